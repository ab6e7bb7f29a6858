"""Decide how every call in a graph will compute, by the recipe and the backend's abilities."""

from collections.abc import Callable, Iterable

from torch import fx, nn

from bitwright.backends import Backend
from bitwright.graph import CapturedModel
from bitwright.graph.facts import facts, set_facts, user_name
from bitwright.graph.passes.fold.arithmetic import Arithmetic
from bitwright.graph.walks import reached_from
from bitwright.nn.operators import Operator, operator_of
from bitwright.nn.registry import qmodule_for
from bitwright.preparation.decisions import Decision, Verdict
from bitwright.preparation.float_tensors import index_arithmetic, ranked
from bitwright.preparation.region import Job, Region
from bitwright.preparation.swap import own_operator
from bitwright.preparation.verdicts import INDICES, RANKED, fused_with, judge

_CALLS = ("call_module", "call_function", "call_method")


def note_skipped(region: Region, job: Job) -> None:
    """Note on a captured graph what rules skip, before schedules replace operators by others."""
    modules = dict(region.model.named_modules())
    for node in region.model.graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        operator = operator_of(node, modules)
        if _computes(node, operator, module):
            target = job.targets.of_captured(node, region.path, _kind(node, operator, module))
            rule = job.recipe.rule_for(target)
            if rule is not None and rule.skip:
                set_facts(node, skipped=rule.match)


def decide(region: Region, job: Job, nodes: Iterable[fx.Node]) -> None:
    """Decide on those of a graph's ``nodes`` that compute, and record that in the region's table."""
    model = region.model
    modules = dict(model.named_modules())
    special = _first_last_layers(model, modules) if job.backend.first_last_bits and not region.path else set()
    exact = {**dict.fromkeys(ranked(model.graph), RANKED), **dict.fromkeys(index_arithmetic(model.graph), INDICES)}
    for node in nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        operator = operator_of(node, modules)
        if not _computes(node, operator, module):
            continue
        decision = _describe(node, operator, module, region, job, first_or_last=node in special)
        region.decisions.record(node, decision)
        region.decisions.judge(node, judge(node, module, decision, job, exact.get(node)))


def _computes(node: fx.Node, operator: Operator | None, module: nn.Module | None) -> bool:
    """Whether a node is an operator: not an input or output, and not arithmetic on sizes and other plain values."""
    if node.op not in _CALLS or facts(node).plain:
        return False
    return operator is not None or module is not None or facts(node).tensor is not None


def _describe(
    node: fx.Node, operator: Operator | None, module: nn.Module | None, region: Region, job: Job, *, first_or_last: bool
) -> Decision:
    """What is known about a call before it is judged."""
    kind = _kind(node, operator, module)
    rule = job.rule_for(node, region.path, kind)
    recipe = job.recipe_for(rule, first_or_last=first_or_last, operator=kind)
    name = region.named(user_name(node))
    if facts(node).leaf:
        return Decision(name, type(module).__name__, None, recipe, rule, origin=facts(node).origin)
    custom = own_operator(qmodule_for(type(module) if module is not None else node.target))
    return Decision(name, kind, operator, recipe, rule, custom, first_or_last, origin=facts(node).origin)


def join_activations(region: Region, backend: Backend) -> None:
    """Let activations and factors that the backend fuses join the integer operator whose only readers they are."""
    for node, decision in region.decisions.within(region.model.graph):
        before = region.decisions.get(node.args[0]) if node.args else None
        if before is None or decision.skipped or decision.forced or decision.operator is None:
            continue
        if len(node.all_input_nodes[0].users) > 1:
            continue
        if _joins_activation(node, decision.operator, before, backend) or _joins_factor(node, region, backend):
            region.decisions.judge(node, fused_with(before.name))


def _joins_activation(node: fx.Node, activation: Operator, before: Decision, backend: Backend) -> bool:
    """Whether the target computes an activation together with the operator before it."""
    if not facts(node).joins or before.keeps_float_result or before.kind in backend.operators.unfused:
        return False
    plain_limits = len(node.all_input_nodes) == 1
    return plain_limits and activation.name in backend.operators.fused and before.verdict is Verdict.INTEGER


def _joins_factor(node: fx.Node, region: Region, backend: Backend) -> bool:
    """Whether a product with a positive number becomes part of the scale of the result before it."""
    factor = Arithmetic.read(node) if backend.operators.scaled_results else None
    if factor is None or not factor.only_scales or factor.tensor is not node.args[0]:
        return False
    source: fx.Node = factor.tensor
    while (maker := region.decisions.get(source)) is not None and maker.verdict is Verdict.FUSED:
        source = source.all_input_nodes[0]
    return maker is not None and maker.verdict is Verdict.INTEGER and maker.places(backend)[1]


def _first_last_layers(model: CapturedModel, modules: dict[str, nn.Module]) -> set[fx.Node]:
    """The layers with a weight that read the network's input or produce its output, through single-input operators."""

    def has_weight(node: fx.Node) -> bool:
        operator = operator_of(node, modules)
        return operator is not None and operator.weight

    found: list[fx.Node] = []
    for node in model.graph.nodes:
        if node.op == "placeholder":
            found += reached_from(node, _until(has_weight, lambda n: n.users, node))
        elif node.op == "output":
            found += reached_from(node, _until(has_weight, lambda n: n.all_input_nodes, node))
    return {node for node in found if has_weight(node)}


def _until(
    has_weight: Callable[[fx.Node], bool], step: Callable[[fx.Node], Iterable[fx.Node]], start: fx.Node
) -> Callable[[fx.Node], Iterable[fx.Node]]:
    """Follow operators on one tensor from ``start`` to the next layers with a weight."""

    def go_on(node: fx.Node) -> Iterable[fx.Node]:
        return step(node) if node is start or (not has_weight(node) and _tensors_in(node) <= 1) else ()

    return go_on


def _tensors_in(node: fx.Node) -> int:
    return sum(1 for n in node.all_input_nodes if facts(n).tensor is not None and n.op != "get_attr")


def _kind(node: fx.Node, operator: Operator | None, module: nn.Module | None) -> str:
    if operator is not None:
        return operator.name
    if module is not None:
        return type(module).__name__
    return getattr(node.target, "__name__", str(node.target))
