"""Hold rules to their word: one that asks for something and changes nothing is a mistake."""

from bitwright.errors import ConfigError
from bitwright.preparation.ledger import Entry, Ledger, Verdict
from bitwright.recipe import Recipe, Rule

_EFFECTIVE = (Verdict.INTEGER, Verdict.PARTLY, Verdict.FUSED)


def check_effects(recipe: Recipe, ledger: Ledger) -> None:
    """Refuse rules that ask for specs where nothing is quantized, or note them if that is allowed."""
    last = {rule.match: rule for rule in recipe.rules}  # of several with one selector, only the last can win
    idle = [line for rule in last.values() if (line := _idle(rule, ledger.entries))]
    if idle and not recipe.allow_float:
        raise ConfigError("; ".join(idle))
    ledger.notes += idle


def _idle(rule: Rule, entries: list[Entry]) -> str:
    won = [e for e in entries if e.rule == rule.match]
    if rule.optional or not rule.asks or not won or _floats(rule):
        return ""
    if any(e.verdict in _EFFECTIVE and (e.weight or rule.asks != ["weight"]) for e in won):
        return ""
    first = won[0]
    why = "it has no weight" if first.verdict in _EFFECTIVE else first.reason or "it only moves values"
    hint = "" if first.verdict in _EFFECTIVE or rule.force else "; force: true quantizes it all the same"
    return f"the rule {rule.match!r} asks {', '.join(rule.asks)} of {first.name} ({first.operator}), but {why}{hint}"


def _floats(rule: Rule) -> bool:
    """Whether all that a rule asks is to stay float."""
    return all(getattr(rule, kind).floating for kind in rule.asks)
