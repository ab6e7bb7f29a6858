"""Decisions: one table per graph of how each operator computes, what was asked for it, and what it got."""

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple, Self

from torch import fx, nn

from bitwright.backends import Backend
from bitwright.nn.operators import Operator
from bitwright.preparation.operator_recipe import OperatorRecipe
from bitwright.recipe import Rule
from bitwright.recipe.rule import Kind

_KEPT = "bitwright_decisions"  # in the __dict__ of a prepared graph


class Verdict(Enum):
    """How an operator will compute."""

    INTEGER = "integer"
    FUSED = "fused"  # part of the integer operator before it
    CARRIED = "carried"  # moves quantized values without changing them
    PARTLY = "partly"  # only its weight, only its inputs or only its result is quantized
    FLOAT = "float"


class Judgement(NamedTuple):
    """A verdict with its reason; ``keep_float`` tells the exporter to keep the runtime from quantizing it anyway."""

    verdict: Verdict
    reason: str = ""
    keep_float: bool = False


FLOAT = Judgement(Verdict.FLOAT)


class Decision(NamedTuple):
    """What was decided for one operator.

    Attributes:
        name: the module's qualified name in the whole model, or the name of the call.
        kind: what it computes, in the ledger's terms.
        operator: its record, if known.
        recipe: how to quantize its tensors.
        rule: the rule that won, if any.
        custom: the user's QModule for it.
        first_or_last: whether it is a first or last layer that the backend treats differently.
        judgement: how it computes, and why.
        inputs: the names of the quantizers of its inputs, in its graph.
        weight: the name of the quantizer of its weight.
        outputs: the names of the quantizers of its result.
        origin: the captured call that a schedule replaced by it, if one did.
    """

    name: str
    kind: str
    operator: Operator | None = None
    recipe: OperatorRecipe = OperatorRecipe()
    rule: Rule | None = None
    custom: type[Any] | None = None
    first_or_last: bool = False
    judgement: Judgement = FLOAT
    inputs: tuple[str, ...] = ()
    weight: str = ""
    outputs: tuple[str, ...] = ()
    origin: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def has_weight(self) -> bool:
        """Whether Bitwright's own QModule quantizes its weight."""
        return self.custom is None and self.operator is not None and self.operator.weight

    @property
    def skipped(self) -> bool:
        return self.rule is not None and self.rule.skip

    @property
    def forced(self) -> bool:
        """Whether its rule quantizes it no matter what the backend does."""
        return self.rule is not None and self.rule.force

    @property
    def quantizes(self) -> bool:
        return self.verdict in (Verdict.INTEGER, Verdict.PARTLY)

    @property
    def brings_quantizers(self) -> bool:
        """Whether it is a quantizer, or has some, placed by the user."""
        return self.operator is None and self.custom is None and not self.forced

    @property
    def asks_result(self) -> bool:
        """Whether its rule says how to quantize the result, separately from other activations."""
        return self.rule is not None and not self.rule.output.empty

    @property
    def keeps_float_result(self) -> bool:
        """Whether the result is a float tensor that others may still read as such."""
        if self.operator is None or self.custom is not None:
            return not getattr(self.custom, "integer", False)
        return self.verdict in (Verdict.FLOAT, Verdict.PARTLY)

    def insists(self, kind: Kind) -> bool:
        """Whether its rule, or its being a first or last layer, says how such a tensor is quantized."""
        by_rule = self.rule is not None and not self.rule.asked(kind).empty
        return by_rule or (self.first_or_last and kind == "input")

    def places(self, backend: Backend) -> tuple[bool, bool]:
        """Whether this operator asks for quantizers on its inputs, and on its result."""
        if self.custom is not None:
            inputs, outputs = True, bool(getattr(self.custom, "integer", False))
        else:
            place = backend.operators.integer.get(self.kind)
            inputs, outputs = place in ("inputs", "both"), place in ("outputs", "both")
        if self.rule is not None:
            outputs |= self.asks_result
            inputs |= not self.rule.input.empty or (self.forced and not outputs)
        return inputs and not self.recipe.input.floating, outputs and not self.recipe.output.floating


class Decisions:
    """The decisions on one graph by node name, in the order they were made."""

    def __init__(self) -> None:
        self._by_node: dict[str, Decision] = {}

    def get(self, node: object) -> Decision | None:
        return self._by_node.get(node.name) if isinstance(node, fx.Node) else None

    def __getitem__(self, node: fx.Node) -> Decision:
        return self._by_node[node.name]

    def items(self) -> list[tuple[str, Decision]]:
        """All decisions with the names of their nodes, including nodes since replaced."""
        return list(self._by_node.items())

    def within(self, graph: fx.Graph) -> Iterator[tuple[fx.Node, Decision]]:
        """The decisions on a graph's current nodes, in graph order."""
        return ((node, self._by_node[node.name]) for node in list(graph.nodes) if node.name in self._by_node)

    def record(self, node: fx.Node | str, decision: Decision) -> None:
        """Record a decision, replacing an earlier one on the same node."""
        self._by_node[node if isinstance(node, str) else node.name] = decision

    def judge(self, node: fx.Node | str, judgement: Judgement) -> None:
        name = node if isinstance(node, str) else node.name
        self._by_node[name] = self._by_node[name]._replace(judgement=judgement)

    def keep_with(self, model: nn.Module) -> None:
        """Store the table with the model; copies of the model share it."""
        model.__dict__[_KEPT] = self


def decisions_of(model: nn.Module) -> Decisions:
    """The table stored with a prepared graph, or an empty one for any other model."""
    return model.__dict__.get(_KEPT) or Decisions()


def decision_on(node: fx.Node) -> Decision | None:
    """The decision on a node of a prepared graph, or of a copy of one."""
    owner = node.graph.owning_module
    return decisions_of(owner).get(node) if owner is not None else None
