"""Judge one operator: in integers, moved along, or float with the reason."""

from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from bitwright.backends import Backend
from bitwright.graph.facts import dtype_of, facts, set_facts
from bitwright.nn.operators import Operator
from bitwright.preparation.ledger import Verdict
from bitwright.recipe import Recipe

if TYPE_CHECKING:
    from bitwright.preparation.decide import Decision

Judgement = tuple[Verdict, str]


def is_float(node: object) -> bool:
    """Whether a node yields a float tensor, and one that holds values: a cache begins as an empty one."""
    info = facts(node).tensor if isinstance(node, fx.Node) else None
    return info is not None and info.dtype.is_floating_point and 0 not in info.shape


def operands(node: fx.Node, operator: Operator | None) -> list[fx.Node]:
    """The float tensors a node computes on, without the weight and bias among a function's arguments."""
    if operator is not None and operator.weight:
        first = node.args[0] if node.args else node.kwargs.get("input")
        return [first] if isinstance(first, fx.Node) else []
    return [n for n in node.all_input_nodes if is_float(n)]


_RECURRENT = "torch computes it in one go; schedules: {split_recurrent: true} quantizes LSTM and GRU"


def judge(decision: "Decision", module: nn.Module | None, recipe: Recipe, backend: Backend) -> Judgement:
    """How an operator computes, by the rule for it, the backend, and what it computes on."""
    rule = decision.rule
    forced = rule is not None and rule.force
    if decision.operator is None and decision.custom is None and not forced:
        recurrent = isinstance(module, nn.RNNBase | nn.RNNCellBase)
        return Verdict.FLOAT, _RECURRENT if recurrent else "unknown operator"
    if rule is not None and rule.skip:
        return Verdict.FLOAT, f"skipped by the rule {rule.match!r}"
    if decision.custom is None and not forced and (found := _by_kind(decision, module, backend)) is not None:
        return found
    if obstacle := _obstacle(decision.node, operands(decision.node, decision.operator)):
        return Verdict.FLOAT, obstacle
    if decision.custom is None and not forced:
        condition = backend.operators.conditions.get(decision.entry.operator)
        obstacle = condition(decision.node) if condition is not None else None
        set_facts(decision.node, keep_float=obstacle is not None)  # the exporter keeps the runtime from trying
        if obstacle:
            return Verdict.FLOAT, obstacle
    return _by_wishes(decision, recipe, backend)


def _by_kind(decision: "Decision", module: nn.Module | None, backend: Backend) -> Judgement | None:
    """What the operator is, and whether the backend has it."""
    node, operator = decision.node, decision.operator
    if operator is None:
        return None
    if operator.carries_scale(node, module):
        return Verdict.CARRIED, ""
    if not is_float(node):
        return Verdict.FLOAT, "not a float tensor"
    name = operator.name
    if name not in backend.operators.integer:
        default = "nothing to fuse it with" if name in backend.operators.fused else f"{backend.name} runs it in float"
        return Verdict.FLOAT, backend.operators.reasons.get(name, default)
    number = operator.binary and len(_tensors(node)) < 2
    if number and operands(node, operator) and name not in backend.operators.numbers:
        return Verdict.FLOAT, "one of its operands is a plain number"
    return None


def _obstacle(node: fx.Node, inputs: list[fx.Node]) -> str:
    """Why no operator could quantize these inputs, or nothing."""
    if not inputs:
        return "no float tensor goes in"
    if any(dtype_of(n) != torch.float32 for n in inputs):
        return "its input is not float32"
    if any(facts(n).written for n in (node, *inputs)):
        return "it shares memory with a tensor that is written to in place"
    return ""


def _by_wishes(decision: "Decision", recipe: Recipe, backend: Backend) -> Judgement:
    """What the recipe leaves of it."""
    has_weight = decision.custom is None and decision.operator is not None and decision.operator.weight
    wishes = decision.wishes
    if recipe.allow_float and (problem := wishes.problem(backend, has_weight)):
        return Verdict.FLOAT, f"allowed to stay float: {problem}"
    by = f"the rule {decision.rule.match!r}" if decision.rule is not None and decision.rule.asks else "the recipe"
    inputs, outputs = decision.places(backend)
    if has_weight and wishes.weight.floating:
        return (Verdict.PARTLY, f"its weight stays float by {by}") if inputs or outputs else _left(by)
    if has_weight and wishes.input.floating:
        return Verdict.PARTLY, f"only its weight is quantized, by {by}"
    if not has_weight and not inputs and not outputs:
        return _left(by)
    in_float = decision.custom is None and decision.entry.operator not in backend.operators.integer
    if in_float and decision.rule is not None:
        return Verdict.INTEGER, f"forced by the rule {decision.rule.match!r}: {backend.name} runs it in float"
    return Verdict.INTEGER, ""


def _left(by: str) -> Judgement:
    return Verdict.FLOAT, f"left float by {by}"


def _tensors(node: fx.Node) -> list[object]:
    return [a for a in (*node.args, *node.kwargs.values()) if is_float(a)]
