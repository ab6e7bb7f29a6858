"""Decide, for every node of a graph, how it will compute: by the recipe and what the backend can do."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bitwright.backends import Backend
from bitwright.graph import CapturedModel
from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import QuantInputMixin
from bitwright.nn.operators import Operator, operator_of
from bitwright.nn.registry import is_custom, qmodule_for
from bitwright.prepare.ledger import Entry, Verdict
from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import Recipe, Rule, TensorRecipe


@dataclass
class Decision:
    """What was decided for one node."""

    node: fx.Node
    operator: Operator | None
    entry: Entry
    rule: Rule | None = None
    custom: type[Any] | None = None  # the user's QModule for it

    @property
    def verdict(self) -> Verdict:
        """Shorthand for the entry's verdict."""
        return self.entry.verdict

    @property
    def keeps_float_result(self) -> bool:
        """Whether the result is a float tensor that others may go on reading as such."""
        if self.operator is None or self.custom is not None:
            return not getattr(self.custom, "integer", False)
        return self.verdict is Verdict.FLOAT


def node_name(node: fx.Node) -> str:
    """What the user calls a node: the module's qualified name, or the node's name."""
    return str(node.target) if node.op == "call_module" else node.name


def is_float(node: object) -> bool:
    """Whether a node yields a float tensor."""
    info = node.meta.get("tensor") if isinstance(node, fx.Node) else None
    return info is not None and info.dtype.is_floating_point


def decide(
    model: CapturedModel, prefix: str, recipe: Recipe, backend: Backend, only: set[fx.Node] | None = None
) -> dict[fx.Node, Decision]:
    """Decide for every call in ``model``, or ``only`` for some; names are seen from the whole: it is at ``prefix``."""
    modules = dict(model.named_modules())
    decisions: dict[fx.Node, Decision] = {}
    for node in model.graph.nodes:
        if only is not None and node not in only:
            continue
        if node.op not in ("call_module", "call_function", "call_method") or node.meta.get("plain"):
            continue  # inputs and outputs, and arithmetic on sizes
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        operator = operator_of(node, modules)
        if operator is None and module is None and node.meta.get("tensor") is None:
            continue  # arithmetic on sizes and other plain values
        name = f"{prefix}.{node_name(node)}" if prefix else node_name(node)
        kind = operator.name if operator else _plain_name(node, module)
        rule = recipe.rule_for(name, _scope(node, prefix), kind)
        entry = Entry(name, kind, Verdict.FLOAT, rule=rule.match if rule else "")
        decision = decisions[node] = Decision(node, operator, entry, rule, custom_qmodule(node, module))
        if decision.custom is not None or isinstance(module, TensorQuantizer | QuantInputMixin):
            entry.verdict, entry.reason = _judge_custom(decision, module)
        else:
            entry.verdict, entry.reason = _judge(node, module, operator, rule, backend)
    return decisions


def join_activations(decisions: dict[fx.Node, Decision], backend: Backend) -> None:
    """Let each activation that the backend fuses join the integer operator whose only user it is."""
    for node, decision in decisions.items():
        if not node.meta.get("joins"):
            continue  # it has to be computed, and rounded, by itself
        source = node.args[0] if node.args else None
        before = decisions.get(source) if isinstance(source, fx.Node) else None
        skipped = decision.rule is not None and decision.rule.skip
        if before is None or skipped or decision.operator is None or decision.operator.name not in backend.fused:
            continue
        if before.keeps_float_result:
            continue
        if before.verdict is Verdict.INTEGER and len(before.node.users) == 1 and _has_plain_limits(node):
            decision.entry.verdict = Verdict.FUSED
            decision.entry.reason = f"computed with {before.entry.name}"


def _has_plain_limits(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 1


def operands(node: fx.Node, operator: Operator | None) -> list[fx.Node]:
    """The float tensors a node computes on, without the weight and bias among a function's arguments."""
    if operator is not None and operator.weight:
        first = node.args[0] if node.args else node.kwargs.get("input")
        return [first] if isinstance(first, fx.Node) else []
    return [n for n in node.all_input_nodes if is_float(n)]


def tensor_recipes(decision: Decision, recipe: Recipe, backend: Backend) -> tuple[TensorRecipe, TensorRecipe]:
    """The recipes of the weight and the activations of a node: rule over recipe over backend."""
    weight = recipe.weight.over(
        TensorRecipe(spec=backend.weight, observer=backend.weight_observer, method=backend.method)
    )
    activation = recipe.activation.over(
        TensorRecipe(spec=backend.activation, observer=backend.observer, method=backend.method)
    )
    if decision.rule is None:
        return weight, activation
    return decision.rule.weight.over(weight), decision.rule.activation.over(activation)


def custom_qmodule(node: fx.Node, module: nn.Module | None) -> type[Any] | None:
    """The class that a user has registered for what a node calls, if it is not one of Bitwright's layers."""
    cls = qmodule_for(type(module) if module is not None else node.target)
    return None if cls is None or not is_custom(cls) or issubclass(cls, QuantLayer) else cls


def _judge_custom(decision: Decision, module: nn.Module | None) -> tuple[Verdict, str]:
    """Judge a node that a user's QModule serves, or that quantizes by itself."""
    if isinstance(module, TensorQuantizer):
        return Verdict.INTEGER, "a quantizer placed by hand"
    if isinstance(module, QuantInputMixin):
        return Verdict.INTEGER, "has quantizers of its own"
    if decision.rule is not None and decision.rule.skip:
        return Verdict.FLOAT, f"skipped by the rule {decision.rule.match!r}"
    inputs = operands(decision.node, decision.operator)
    return (Verdict.FLOAT, obstacle) if (obstacle := _obstacle(decision.node, inputs)) else (Verdict.INTEGER, "")


def _obstacle(node: fx.Node, inputs: list[fx.Node]) -> str:
    """Why no operator could quantize these inputs, or nothing."""
    if not inputs:
        return "no float tensor goes in"
    if any(n.meta["tensor"].dtype != torch.float32 for n in inputs):
        return "its input is not float32"
    if any(n.meta.get("written") for n in (node, *inputs)):
        return "it shares memory with a tensor that is written to in place"
    return ""


def _judge(
    node: fx.Node,
    module: nn.Module | None,
    operator: Operator | None,
    rule: Rule | None,
    backend: Backend,
) -> tuple[Verdict, str]:
    if operator is None:
        return Verdict.FLOAT, "unknown operator"
    if rule is not None and rule.skip:
        return Verdict.FLOAT, f"skipped by the rule {rule.match!r}"
    if operator.carries_scale(node, module):
        return Verdict.CARRIED, ""
    if not is_float(node):
        return Verdict.FLOAT, "not a float tensor"
    if operator.name not in backend.integer:
        default = "nothing to fuse it with" if operator.name in backend.fused else f"{backend.name} runs it in float"
        return Verdict.FLOAT, backend.reasons.get(operator.name, default)
    inputs = operands(node, operator)
    if not inputs:
        return Verdict.FLOAT, "no float tensor goes in"
    if not operator.weight and operator.name in ("add", "mul", "matmul") and len(_tensors(node)) < 2:
        return Verdict.FLOAT, "one of its operands is a plain number"
    if common := _obstacle(node, inputs):
        return Verdict.FLOAT, common
    obstacle = backend.conditions[operator.name](node) if operator.name in backend.conditions else None
    node.meta["keep_float"] = obstacle is not None  # the exporter keeps the runtime from trying
    return (Verdict.FLOAT, obstacle) if obstacle else (Verdict.INTEGER, "")


def _tensors(node: fx.Node) -> list[object]:
    return [a for a in (*node.args, *node.kwargs.values()) if is_float(a)]


def _scope(node: fx.Node, prefix: str) -> str:
    scope = node.meta.get("scope", "")
    return ".".join(p for p in (prefix, scope) if p)


def _plain_name(node: fx.Node, module: nn.Module | None) -> str:
    if module is not None:
        return type(module).__name__
    return getattr(node.target, "__name__", str(node.target))
