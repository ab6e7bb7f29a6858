"""Rewrites of a deployed graph: what a runtime needs to see, and what it need not compute."""

from operator import getitem

import torch
from torch import fx, nn

from bitwright.exporting.modules import DeployedFunction
from bitwright.exporting.parts import IntegerTensor, KeepFloat
from bitwright.graph import CapturedModel
from bitwright.graph.facts import copy_facts, facts, set_facts, shape_of
from bitwright.graph.names import add_internal
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer
from bitwright.nn.operators import operator_of
from bitwright.preparation import Verdict, decision_on
from bitwright.quantizer import TensorQuantizer

Modules = dict[str, nn.Module]
GUARDS = "guards"  # in a model's namespace: what keeps a runtime from quantizing by itself


def drop_redundant_activations(model: CapturedModel, modules: Modules) -> None:
    """Remove ReLU and clamps whose effect the quantizer after them has anyway: it saturates at the same values."""
    for node in list(model.graph.nodes):
        operator = operator_of(node, modules)
        limits = None if operator is None else operator.limits_of(node, _module(node, modules))
        if limits is None or len(node.users) != 1:
            continue
        quantizer = _module(next(iter(node.users)), modules)
        if isinstance(quantizer, TensorQuantizer) and quantizer.enabled and _saturates(quantizer, limits):
            node.replace_all_uses_with(node.args[0])  # pyrefly: ignore
            model.graph.erase_node(node)


def _saturates(quantizer: TensorQuantizer, limits: tuple[float | None, float | None]) -> bool:
    """Whether a quantizer's range ends within the limits, so that clamping to them changes nothing."""
    if quantizer.scale.ndim or not quantizer.uniform:
        return False
    scale, zero_point = (p.item() for p in quantizer.qparams())
    spec = quantizer.spec
    ends = zip(limits, (spec.qmin, spec.qmax), strict=True)
    lowest, highest = (end if limit is None else round(limit / scale) + zero_point for limit, end in ends)
    return lowest <= spec.qmin and highest >= spec.qmax


def requantize_carried(model: CapturedModel, modules: Modules) -> None:
    """Repeat the quantizer after each operator that carries its scale on: runtimes look for one at every integer input.

    The values are on the grid already: in the simulation the repetition changes nothing, so it is only made here.
    """
    carried: dict[fx.Node, str] = {}
    wanted = _leads_to_quantized(model, modules)
    for node in list(model.graph.nodes):
        quantizer = _module(node, modules)
        if isinstance(quantizer, TensorQuantizer):
            method = quantizer.method
            if method.axis is None and method.uniform:  # scales of channels may not fit the shape that comes out
                carried[node] = str(node.target)
            continue
        operator = operator_of(node, modules)
        module = _module(node, modules)
        source = node.args[0] if node.args else None
        if operator is None or not isinstance(source, fx.Node) or source not in carried:
            continue
        if not operator.carries_scale(node, module):
            continue
        carried[node] = carried[source]
        if facts(node).tensor is None or node not in wanted:
            continue
        with model.graph.inserting_after(node):
            again = model.graph.create_node("call_module", carried[source], (node,), name=f"{node.name}_carried")
        node.replace_all_uses_with(again, delete_user_cb=lambda user, own=again: user is not own)
        copy_facts(node, again)
        carried[again] = carried[source]


def _leads_to_quantized(model: CapturedModel, modules: Modules) -> set[fx.Node]:
    """The nodes whose values reach an integer operator before anything else computes on them."""
    reach: set[fx.Node] = set()
    for node in reversed(list(model.graph.nodes)):
        for user in node.users:
            module = _module(user, modules)
            operator = operator_of(user, modules)
            if operator is not None and operator.carries_scale(user, module):
                reach.update({node} if user in reach else set())
            elif (decision := decision_on(user)) is not None and decision.verdict is Verdict.INTEGER:
                reach.add(node)
    return reach


def guard(model: CapturedModel, modules: Modules) -> None:
    """Keep a runtime from what it gets wrong: quantizing layers that stay float, and applying scales twice."""
    for node in list(model.graph.nodes):
        decision = decision_on(node)
        if decision is not None and decision.judgement.keep_float:
            for source in node.all_input_nodes:
                if facts(source).tensor is not None:
                    _guard(model, source, [node])
        elif any(wrong(node, modules) for wrong in _WRONG_AFTER):
            _guard(model, node, list(node.users))
        elif _is_float_layer(node, modules) and _becomes_quantized(node, modules):
            for source in [each for each in node.all_input_nodes if _is_quantized(each, modules)]:
                _guard(model, source, [node])  # before it, so that what follows can still be joined with it


def _is_float_layer(node: fx.Node, modules: Modules) -> bool:
    operator = operator_of(node, modules)
    return operator is not None and operator.weight and not isinstance(_module(node, modules), QuantLayer)


def _is_quantized(node: fx.Node, modules: Modules) -> bool:
    """Whether a value comes from a quantizer, also by way of operators that only move it."""
    while not isinstance(_module(node, modules), TensorQuantizer):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _carries(node, modules):
            return False
        node = source
    return True


def _becomes_quantized(node: fx.Node, modules: Modules) -> bool:
    """Whether a layer's result goes to a quantizer, also by way of what a runtime moves or joins with the layer."""
    waiting, seen = list(node.users), set[fx.Node]()
    while waiting:
        user = waiting.pop()
        module = _module(user, modules)
        if isinstance(module, TensorQuantizer):
            return True
        if user not in seen and (_carries(user, modules) or _joins(user, modules)):
            waiting += user.users
        seen.add(user)
    return False


def _carries(node: fx.Node, modules: Modules) -> bool:
    operator = operator_of(node, modules)
    return operator is not None and operator.carries_scale(node, _module(node, modules))


def _joins(node: fx.Node, modules: Modules) -> bool:
    """Whether a runtime may make an operator part of the layer before it: one with a single tensor to compute on."""
    return sum(facts(source).tensor is not None for source in node.all_input_nodes) == 1


def _scaled_twice(node: fx.Node, modules: Modules) -> bool:
    """Whether OpenVINO (2026.4) would apply a layer's scale twice: a convolution without bias that two read."""
    module = _module(node, modules)
    if len(node.users) < 2:
        return False
    if isinstance(module, DeployedFunction):
        weight = module.stored.weight
        return isinstance(weight, IntegerTensor) and weight.integers.ndim > 2 and not module.stored.has_bias
    if not isinstance(module, QuantLayer) or isinstance(module, QuantFunction):
        return False
    weight, bias = module.folded_weight()
    return bias is None and weight.ndim > 2


def _rounded_average(node: fx.Node, modules: Modules) -> bool:
    """Whether OpenVINO (2026.4) would round an average that stays float: arithmetic or padding reads it."""
    kind = operator_of(node, modules)
    if kind is None or "avg_pool" not in kind.name:
        return False
    return not all(isinstance(_module(user, modules), TensorQuantizer) for user in node.users)


def _clipped_extreme(node: fx.Node, modules: Modules) -> bool:
    """Whether OpenVINO (2026.4) would clip a largest value at 0: a quantizer reads it, which it makes part of it."""
    source = node.args[0] if node.args and node.target in (getattr, getitem) else node
    reduces = isinstance(source, fx.Node) and source.target in _EXTREMES
    return reduces and any(isinstance(_module(user, modules), TensorQuantizer) for user in node.users)


_EXTREMES = {torch.amax, torch.amin, torch.max, torch.min, "amax", "amin", "max", "min"}
_WRONG_AFTER = (_scaled_twice, _rounded_average, _clipped_extreme)


def _guard(model: CapturedModel, tensor: fx.Node, users: list[fx.Node]) -> None:
    name = add_internal(model, GUARDS, tensor.name, KeepFloat())
    with model.graph.inserting_after(tensor):
        guard = model.graph.create_node("call_module", name, (tensor,), name=f"{tensor.name}_kept_float")
    set_facts(guard, tensor=facts(tensor).tensor)
    for user in users:
        user.replace_input_with(tensor, guard)


def averages_planes(node: fx.Node, modules: Modules) -> bool:
    """Whether a node averages over all spatial dimensions."""
    operator, shape = operator_of(node, modules), shape_of(node)
    if operator is None or shape is None or len(shape) != operator.rank + 2:
        return False
    return operator.averages_planes_of(node, _module(node, modules))


def _module(node: fx.Node, modules: Modules) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None
