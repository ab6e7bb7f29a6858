"""The ledger: for every operator of a model, what was requested, what it got, and why."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from bitwright.backends import Backend
from bitwright.columns import in_columns
from bitwright.errors import ConfigError
from bitwright.graph import Inputs
from bitwright.graph.capture.guards import Guard
from bitwright.graph.sketch import NodeSketch
from bitwright.preparation.decisions import Decision, Decisions, Verdict
from bitwright.recipe import Recipe, Rule

if TYPE_CHECKING:
    from rich.table import Table

HEADER = ("name", "operator", "computes", "rule", "asked", "input", "weight", "output", "reason")
_EFFECTIVE = (Verdict.INTEGER, Verdict.PARTLY, Verdict.FUSED)
WAITING = "bitwright_waits"  # in the __dict__ of a model that will be prepared at its first call


@dataclass(frozen=True)
class Entry:
    """One operator in the ledger.

    Attributes:
        name: the module's qualified name, or the name of the call.
        operator: what it computes.
        verdict: how it computes.
        reason: why.
        rule: the selector of the rule that won, if any.
        weight: actual spec of its weight.
        input: actual specs of its inputs.
        output: actual spec of its result.
        asked: the specs that the rule, recipe and backend ask for.
        graph: the qualified name of its graph; None for a layer outside any graph.
        node: the name of its call in that graph.
        origin: the captured call that a schedule replaced by it, alone or with others, if one did.
    """

    name: str
    operator: str
    verdict: Verdict
    reason: str = ""
    rule: str = ""
    weight: str = ""
    input: str = ""
    output: str = ""
    asked: str = ""
    graph: str | None = None
    node: str = ""
    origin: str = ""


@dataclass
class Ledger:
    """What prepare or swap_modules did to a model; it prints as a table, more nicely in a terminal with rich.

    Attributes:
        entries: how each operator computes, and why.
        notes: what else was done or left undone, in words.
        arguments: further arguments of the call, beyond model, backend and recipe, to repeat it.
        swapped: whether it was swap_modules.
        tuned: the findings of tuning, in words; also in the notes.
        corrected: what correctors did to the calibrated model, one line for each.
    """

    backend: Backend
    recipe: Recipe
    example: Inputs
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    islands: dict[str, str] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    before: dict[str, tuple[NodeSketch, ...]] = field(default_factory=dict)  # the graphs as captured, by their paths
    arguments: dict[str, Any] = field(default_factory=dict)
    swapped: bool = False
    tuned: list[str] = field(default_factory=list)
    corrected: list[str] = field(default_factory=list)

    def count(self) -> Counter[Verdict]:
        return Counter(e.verdict for e in self.entries)

    def title(self) -> str:
        """The backend and how many operators compute how."""
        counts = ", ".join(f"{count} {verdict.value}" for verdict, count in self.count().items())
        return f"{self.backend.name}: {counts or 'no operators'}"

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table, in the order of ``HEADER``."""
        return [
            (e.name, e.operator, e.verdict.value, e.rule, e.asked, e.input, e.weight, e.output, e.reason)
            for e in self.entries
        ]

    def __str__(self) -> str:
        return "\n".join([self.title(), *in_columns(HEADER, self.rows(), 3), *(f"Note: {note}" for note in self.notes)])

    __repr__ = __str__

    def __rich__(self) -> "Table":
        from rich.table import Table

        rows = self.rows()
        table = Table(title=self.title(), title_justify="left")
        kept = [i for i in range(len(HEADER)) if i < 3 or any(row[i] for row in rows)]
        for i in kept:
            table.add_column(HEADER[i], overflow="fold")
        for row in rows:
            table.add_row(*(row[i] for i in kept))
        return table


def entries_of(decisions: Decisions, owner: nn.Module, backend: Backend, graph: str | None = None) -> list[Entry]:
    """The entries for a table of decisions, whose quantizers ``owner`` has."""
    return [
        Entry(
            decision.name,
            decision.kind,
            decision.verdict,
            decision.judgement.reason,
            decision.rule.match if decision.rule is not None else "",
            _specs(owner, [decision.weight] if decision.weight else []),
            _specs(owner, decision.inputs),
            _specs(owner, decision.outputs),
            _asked(decision, backend),
            graph,
            node if graph is not None else "",
            decision.origin,
        )
        for node, decision in decisions.items()
    ]


def _specs(owner: nn.Module, names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(str(owner.get_submodule(name).spec) for name in names))


def _asked(decision: Decision, backend: Backend) -> str:
    computes = decision.verdict is not Verdict.CARRIED and not decision.skipped
    if not decision.quantizes and not (computes and decision.kind in backend.operators.integer):
        return ""
    return decision.recipe.text(decision.operator is not None and decision.operator.weight)


def check_unused_rules(recipe: Recipe, ledger: Ledger) -> None:
    """Refuse rules that set specs where nothing is quantized, or note them if that is allowed."""
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
    return f"the rule {rule.match!r} sets {', '.join(rule.asks)} for {first.name} ({first.operator}), but {why}"


def _has_effect(rule: Rule, entry: Entry) -> bool:
    return entry.verdict in _EFFECTIVE and (bool(entry.weight) or rule.asks != ["weight"])


def _why_float(rule: Rule, entry: Entry) -> str:
    reason = entry.reason or "it only moves values"
    return reason if rule.force else f"{reason}; force: true quantizes it anyway"


def attach(model: nn.Module, ledger: Ledger) -> None:
    """Keep the ledger with the model."""
    model.__dict__["bitwright_ledger"] = ledger


def is_prepared(model: object) -> bool:
    """Whether a model is prepared, or will be at its first call."""
    state = model.__dict__ if isinstance(model, nn.Module) else {}
    return WAITING in state or isinstance(state.get("bitwright_ledger"), Ledger)


def ledger_of(model: nn.Module) -> Ledger:
    """The ledger of a prepared model."""
    if WAITING in getattr(model, "__dict__", {}):
        raise ConfigError(
            f"this {type(model).__name__} is prepared at its first call: run it once, or pass example_inputs "
            "to the function that prepared it"
        )
    if not is_prepared(model):
        raise ConfigError(
            f"this {type(model).__name__} was not made by bitwright.prepare: give what prepare(model, inputs) returns"
        )
    return model.__dict__["bitwright_ledger"]
