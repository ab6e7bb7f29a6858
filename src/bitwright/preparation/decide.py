"""Decide, for every node of a graph, how it will compute: by the recipe and what the backend can do."""

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from bitwright.backends import Backend
from bitwright.graph import CapturedModel
from bitwright.graph.facts import facts, set_facts
from bitwright.graph.names import node_name
from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import QuantInputMixin
from bitwright.nn.operators import Operator, operator_of
from bitwright.nn.registry import is_custom, qmodule_for
from bitwright.preparation.first_last_layers import end_layers
from bitwright.preparation.indices import index_arithmetic
from bitwright.preparation.judge import is_float, judge, operands
from bitwright.preparation.ledger import Entry, Verdict
from bitwright.preparation.rule_targets import Subjects
from bitwright.preparation.wishes import Wishes, complete
from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import Recipe, Rule, Subject
from bitwright.recipe.rule import Kind

__all__ = ["Decision", "decide", "is_float", "join_activations", "node_name", "operands"]


@dataclass
class Decision:
    """What was decided for one node."""

    node: fx.Node
    operator: Operator | None
    entry: Entry
    wishes: Wishes
    rule: Rule | None = None
    subject: Subject = field(default_factory=lambda: Subject(""))
    custom: type[Any] | None = None  # the user's QModule for it
    at_end: bool = False

    @property
    def verdict(self) -> Verdict:
        """Shorthand for the entry's verdict."""
        return self.entry.verdict

    @property
    def quantizes(self) -> bool:
        """Whether it has quantizers."""
        return self.verdict in (Verdict.INTEGER, Verdict.PARTLY)

    @property
    def own_quantizers(self) -> bool:
        """Whether it is a quantizer, or has some already, placed by the user."""
        return self.operator is None and self.custom is None and not (self.rule is not None and self.rule.force)

    @property
    def asks_result(self) -> bool:
        """Whether its rule says how the result is quantized, apart from other activations."""
        return self.rule is not None and not self.rule.output.empty

    @property
    def keeps_float_result(self) -> bool:
        """Whether the result is a float tensor that others may go on reading as such."""
        if self.operator is None or self.custom is not None:
            return not getattr(self.custom, "integer", False)
        return self.verdict in (Verdict.FLOAT, Verdict.PARTLY)

    def insists(self, kind: Kind) -> bool:
        """Whether its rule, or its place at an end of the network, says how such a tensor is quantized."""
        return (self.rule is not None and not self.rule.asked(kind).empty) or (self.at_end and kind == "input")

    def places(self, backend: Backend) -> tuple[bool, bool]:
        """Whether its inputs, and whether its result, have quantizers of this operator's asking."""
        if self.custom is not None:
            inputs, outputs = True, bool(getattr(self.custom, "integer", False))
        else:
            place = backend.operators.integer.get(self.entry.operator)
            inputs, outputs = place in ("inputs", "both"), place in ("outputs", "both")
        if self.rule is not None:
            inputs |= not self.rule.input.empty
            outputs |= self.asks_result
            inputs |= self.rule.force and not outputs
        return inputs and not self.wishes.input.floating, outputs and not self.wishes.output.floating


def decide(
    model: CapturedModel,
    prefix: str,
    recipe: Recipe,
    backend: Backend,
    subjects: Subjects,
    only: set[fx.Node] | None = None,
) -> dict[fx.Node, Decision]:
    """Decide for every call in ``model``, or ``only`` for some; names are seen from the whole: it is at ``prefix``."""
    if only is not None and not only:
        return {}
    modules = dict(model.named_modules())
    ends = _ends(model, modules) if backend.first_last_bits and not prefix else set()
    indices = index_arithmetic(model.graph)
    decisions: dict[fx.Node, Decision] = {}
    completed: dict[tuple[int, bool], Wishes] = {}
    for node in model.graph.nodes:
        if only is not None and node not in only:
            continue
        if node.op not in ("call_module", "call_function", "call_method") or facts(node).plain:
            continue  # inputs and outputs, and arithmetic on sizes
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        operator = operator_of(node, modules)
        if operator is None and module is None and facts(node).tensor is None:
            continue  # arithmetic on sizes and other plain values
        name = f"{prefix}.{node_name(node)}" if prefix else node_name(node)
        kind = operator.name if operator else _plain_name(node, module)
        set_facts(node, operator=kind)  # for conditions of backends, which see nodes only
        subject = subjects.of_node(node, name, prefix, kind)
        rule = recipe.rule_for(subject)
        key = (id(rule), node in ends)
        if key not in completed:
            completed[key] = complete(rule, recipe, backend, at_end=node in ends)
        wishes = completed[key]
        entry = Entry(name, kind, Verdict.FLOAT, rule=rule.match if rule else "")
        custom = custom_qmodule(node, module)
        decision = Decision(node, operator, entry, wishes, rule, subject, custom, node in ends)
        decisions[node] = decision
        if wish := facts(node).leaf:
            decision.operator = decision.custom = None
            entry.operator, entry.reason = type(module).__name__, leaf_reason(wish)
        elif node in indices:
            entry.reason = "it computes indices"
        elif isinstance(module, TensorQuantizer):
            entry.verdict, entry.reason = Verdict.INTEGER, "a quantizer placed by hand"
        elif isinstance(module, QuantInputMixin):
            entry.verdict, entry.reason = Verdict.INTEGER, "has quantizers of its own"
        else:
            entry.verdict, entry.reason = judge(decision, module, recipe, backend)
        skipped = rule is not None and rule.skip
        if decision.quantizes or (kind in backend.operators.integer and entry.verdict is Verdict.FLOAT and not skipped):
            entry.asked = wishes.asked(operator is not None and operator.weight)
    return decisions


def leaf_reason(wish: str) -> str:
    """Why a leaf stays float."""
    return f"a leaf by request: {wish!r}"


def join_activations(decisions: dict[fx.Node, Decision], backend: Backend) -> None:
    """Let each activation that the backend fuses join the integer operator whose only user it is."""
    for node, decision in decisions.items():
        if not facts(node).joins:
            continue  # it has to be computed, and rounded, by itself
        source = node.args[0] if node.args else None
        before = decisions.get(source) if isinstance(source, fx.Node) else None
        apart = decision.rule is not None and (decision.rule.skip or decision.rule.force)
        if before is None or apart or decision.operator is None:
            continue
        if decision.operator.name not in backend.operators.fused:
            continue
        if before.keeps_float_result or before.entry.operator in backend.operators.unfused:
            continue
        if before.verdict is Verdict.INTEGER and len(before.node.users) == 1 and _has_plain_limits(node):
            decision.entry.verdict = Verdict.FUSED
            decision.entry.reason = f"computed with {before.entry.name}"


def _has_plain_limits(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 1


def custom_qmodule(node: fx.Node, module: nn.Module | None) -> type[Any] | None:
    """The class that a user has registered for what a node calls, if it is not one of Bitwright's layers."""
    cls = qmodule_for(type(module) if module is not None else node.target)
    return None if cls is None or not is_custom(cls) or issubclass(cls, QuantLayer) else cls


def _ends(model: CapturedModel, modules: dict[str, nn.Module]) -> set[fx.Node]:
    def has_weight(node: fx.Node) -> bool:
        operator = operator_of(node, modules)
        return operator is not None and operator.weight

    return end_layers(model, has_weight)


def _plain_name(node: fx.Node, module: nn.Module | None) -> str:
    if module is not None:
        return type(module).__name__
    return getattr(node.target, "__name__", str(node.target))
