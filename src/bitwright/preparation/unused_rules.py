"""Find rules that ask for something and change nothing: they are mistakes."""

from bitwright.errors import ConfigError
from bitwright.preparation.decisions import Verdict
from bitwright.preparation.ledger import Entry, Ledger
from bitwright.recipe import Recipe, Rule

_EFFECTIVE = (Verdict.INTEGER, Verdict.PARTLY, Verdict.FUSED)


def check_unused_rules(recipe: Recipe, ledger: Ledger) -> None:
    """Refuse rules that ask for specs where nothing is quantized, or note them if that is allowed."""
    last = {rule.match: rule for rule in recipe.rules}  # if several rules share a selector, the last one wins
    unused = [line for rule in last.values() if (line := _complaint(rule, ledger.entries))]
    if unused and not recipe.allow_float:
        raise ConfigError("; ".join(unused))
    ledger.notes += unused


def _complaint(rule: Rule, entries: list[Entry]) -> str:
    won = [e for e in entries if e.rule == rule.match]
    only_float = all(getattr(rule, kind).floating for kind in rule.asks)
    if rule.optional or only_float or not won or any(_has_effect(rule, entry) for entry in won):
        return ""
    first = won[0]
    why = "it has no weight" if first.verdict in _EFFECTIVE else _why_float(rule, first)
    return f"the rule {rule.match!r} asks {', '.join(rule.asks)} of {first.name} ({first.operator}), but {why}"


def _has_effect(rule: Rule, entry: Entry) -> bool:
    return entry.verdict in _EFFECTIVE and (bool(entry.weight) or rule.asks != ["weight"])


def _why_float(rule: Rule, entry: Entry) -> str:
    reason = entry.reason or "it only moves values"
    return reason if rule.force else f"{reason}; force: true quantizes it all the same"
