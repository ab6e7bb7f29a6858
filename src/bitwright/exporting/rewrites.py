"""Rewrites of a deployed graph: add what a runtime needs to see, and remove what it need not compute."""

import torch
from torch import fx, nn

from bitwright.graph import CapturedModel
from bitwright.graph.facts import copy_facts, facts, shape_of
from bitwright.nn.channel_limit import ChannelLimit
from bitwright.nn.operators import operator_of
from bitwright.preparation import Verdict, decision_on
from bitwright.quantizer import TensorQuantizer, saturates

Modules = dict[str, nn.Module]
_BYTE = 8  # bits


def limits_to_relu(model: CapturedModel, modules: Modules) -> None:
    """Make limits of each channel a ReLU where quantizers saturate below all of them, which few runtimes have."""
    for node in model.graph.nodes:
        module = _module(node, modules)
        if isinstance(module, ChannelLimit):
            readers = [_module(user, modules) for user in node.users]
            found = [r for r in readers if isinstance(r, TensorQuantizer) and r.enabled]
            if len(found) == len(readers) and all(saturates(q, (None, module.lowest)) for q in found):
                node.op, node.target = "call_function", torch.relu


def drop_redundant_activations(model: CapturedModel, modules: Modules) -> None:
    """Remove ReLU and clamps before a quantizer that saturates at the same values anyway."""
    for node in list(model.graph.nodes):
        operator, quantizer = operator_of(node, modules), _only_quantizer(node, modules)
        limits = None if operator is None else operator.limits_of(node, _module(node, modules))
        if limits is not None and quantizer is not None and saturates(quantizer, limits):
            node.replace_all_uses_with(node.args[0])  # pyrefly: ignore
            model.graph.erase_node(node)


def _only_quantizer(node: fx.Node, modules: Modules) -> TensorQuantizer | None:
    """The quantizer that alone reads a node's result."""
    found = _module(next(iter(node.users)), modules) if len(node.users) == 1 else None
    return found if isinstance(found, TensorQuantizer) and found.enabled else None


def requantize_carried(model: CapturedModel, modules: Modules) -> None:
    """Repeat the quantizer after each operator that passes on its scale: runtimes look for one at every integer input.

    The values are already on the grid: in the simulation the repetition changes nothing, so it is only done here.
    """
    carried: dict[fx.Node, str] = {}
    wanted = _leads_to_quantized(model, modules)
    for node in list(model.graph.nodes):
        quantizer = _module(node, modules)
        if isinstance(quantizer, TensorQuantizer):
            method = quantizer.method
            if method.axis is None and method.uniform:  # per-channel scales may not fit the resulting shape
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


def plain_quantizer_after(node: fx.Node, modules: Modules) -> TensorQuantizer | None:
    """The quantizer that alone reads a node's result, if it has one scale and evenly spaced integers."""
    return _plain(_module(next(iter(node.users)), modules)) if len(node.users) == 1 else None


def _plain(module: nn.Module | None) -> TensorQuantizer | None:
    if not isinstance(module, TensorQuantizer) or not module.quantizes or module.spec.format.floating:
        return None
    return module if module.uniform and not module.scale.ndim and module.spec.bits <= _BYTE else None


def averages_planes(node: fx.Node, modules: Modules) -> bool:
    """Whether a node averages over all spatial dimensions."""
    operator, shape = operator_of(node, modules), shape_of(node)
    if operator is None or shape is None or len(shape) != operator.rank + 2:
        return False
    return operator.averages_planes_of(node, _module(node, modules))


def _module(node: fx.Node, modules: Modules) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None
