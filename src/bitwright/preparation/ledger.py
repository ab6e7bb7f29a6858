"""The ledger: for every operator of a model, what was asked, what it got, and why."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from torch import nn

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.graph import Inputs
from bitwright.graph.capture.guards import Decision
from bitwright.graph.sketch import Spot
from bitwright.recipe import Recipe

WAITING = "bitwright_waits"  # in the __dict__ of a model that will be prepared when it is first called


class Verdict(Enum):
    """How an operator will compute."""

    INTEGER = "integer"
    FUSED = "fused"  # part of the integer operator before it
    CARRIED = "carried"  # moves quantized values without changing them
    PARTLY = "partly"  # only its weight, only its inputs or only its result are quantized
    FLOAT = "float"


@dataclass
class Entry:
    """One operator in the ledger.

    Attributes:
        name: the module's qualified name, or the name of the call.
        operator: what it computes.
        verdict: how.
        reason: why so.
        rule: the selector of the rule that won, if any.
        weight: spec of its weight, as it got it.
        input: specs of its inputs, as it got them.
        output: spec of its result, as it got it.
        asked: the specs that rule, recipe and backend ask for.
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


@dataclass
class Ledger:
    """What prepare did to a model."""

    backend: Backend
    recipe: Recipe
    example: Inputs
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    islands: dict[str, str] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    before: dict[str, tuple[Spot, ...]] = field(default_factory=dict)  # the graphs as captured, by where they are

    def count(self) -> Counter[Verdict]:
        """How many operators got which verdict."""
        return Counter(e.verdict for e in self.entries)


def attach(model: nn.Module, ledger: Ledger) -> None:
    """Keep the ledger with the model."""
    model.__dict__["bitwright_ledger"] = ledger


def is_prepared(model: object) -> bool:
    """Whether a model is the work of prepare, or will be when it is first called."""
    state = model.__dict__ if isinstance(model, nn.Module) else {}
    return WAITING in state or isinstance(state.get("bitwright_ledger"), Ledger)


def ledger_of(model: nn.Module) -> Ledger:
    """The ledger of a prepared model."""
    if WAITING in getattr(model, "__dict__", {}):
        raise ConfigError(
            f"this {type(model).__name__} is prepared when it is first called: run it once, or give example_inputs "
            "to what has prepared it"
        )
    if not is_prepared(model):
        raise ConfigError(f"this {type(model).__name__} was not made by bitwright.prepare")
    return model.__dict__["bitwright_ledger"]
