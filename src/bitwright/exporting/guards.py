"""Guards in a deployed graph: keep a runtime from what it gets wrong, and from quantizing what stays float.

A guard changes no value, but runtimes do not look past it. OpenVINO moves scales through operators, merges constants
into quantizers and weights, and then sometimes computes other values; each function that finds such a place gives the
reason.
"""

import math
from collections.abc import Iterator
from operator import getitem

import torch
from torch import fx, nn

from bitwright.exporting.modules import DeployedFunction
from bitwright.exporting.parts import IntegerTensor, KeepFloat
from bitwright.graph import CapturedModel
from bitwright.graph.expression import is_constant
from bitwright.graph.facts import facts, set_facts, shape_of
from bitwright.graph.names import add_internal
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer
from bitwright.nn.operators import operator_of
from bitwright.preparation import Verdict, decision_on
from bitwright.quantizer import TensorQuantizer

Modules = dict[str, nn.Module]
GUARDS = "guards"  # in a model's namespace: what keeps a runtime from quantizing on its own


def guard(model: CapturedModel, modules: Modules, *, apart: bool = False) -> None:
    """Put guards where a runtime would compute values other than the model's, and enter them among the modules.

    ``apart`` keeps OpenVINO from computing other values, and all that stays float apart from quantized tensors and from
    constants.
    """
    for node in list(model.graph.nodes):
        decision = decision_on(node)
        kept = decision is not None and decision.judgement.keep_float
        if apart and any(wrong(node, modules) for wrong in _WRONG_AFTER):
            _guard(model, modules, node, list(node.users))
        if kept:
            for source in node.all_input_nodes:
                if facts(source).tensor is not None:
                    _guard(model, modules, source, [node])
        elif _is_float_layer(node, modules) and _becomes_quantized(node, modules):
            for source in [each for each in node.all_input_nodes if _is_quantized(each, modules)]:
                _guard(model, modules, source, [node])  # before it, so that what follows can still be fused with it
    for tensor, readers in _mixed(model, modules) if apart else ():
        _guard(model, modules, tensor, readers)


def _mixed(model: CapturedModel, modules: Modules) -> list[tuple[fx.Node, list[fx.Node]]]:
    """The tensors that float operators must not see directly, with those readers.

    OpenVINO (2026.4) moves the scale of a quantized tensor through what reads it, and rounds the limits of a clamp to
    its steps. It takes any product with a constant for a scale: it moves that through selections, which it then
    refuses, and into the weight of the layer before, also where other calls share the weight. It quantizes the parts of
    what is joined, each channel with a scale of its own, and refuses linear layers that read that. It moves the scales
    of a linear layer's results through pools and upsampling, and refuses the sizes.
    """
    tensors = [node for node in model.graph.nodes if (made := facts(node).tensor) and not made.dtype.is_complex]
    return [(tensor, readers) for tensor in tensors if (readers := list(_misled(tensor, modules)))]


def _misled(tensor: fx.Node, modules: Modules) -> Iterator[fx.Node]:
    """The readers of a tensor that must not see it directly."""
    constants, layer = _has_constants(tensor, modules), _is_layer(tensor, modules)
    scaled = _is_quantized(tensor, modules) or (_is_integer(tensor) and not layer)
    joined = _is_joined(tensor, modules)
    for user in tensor.users:
        if isinstance(_module(user, modules), TensorQuantizer):
            wrong = joined and any(_is_linear(reader) for reader in user.users)
        elif constants:
            wrong = decision_on(user) is not None
        else:
            apart = scaled and _stays_float(user, modules) and not _joins_quantizer(user, modules)
            wrong = apart or (layer and _has_constants(user, modules))
            wrong = wrong or (_is_linear(tensor) and _resizes(user, modules))
        if wrong:
            yield user


def _is_integer(node: fx.Node) -> bool:
    decision = decision_on(node)
    return decision is not None and decision.verdict is Verdict.INTEGER


def _is_float(node: fx.Node) -> bool:
    decision = decision_on(node)
    return decision is not None and decision.verdict is Verdict.FLOAT


def _is_linear(node: fx.Node) -> bool:
    decision = decision_on(node)
    return decision is not None and decision.kind == "linear"


def _resizes(node: fx.Node, modules: Modules) -> bool:
    operator = operator_of(node, modules)
    return operator is not None and (operator.pool or operator.name == "interpolate")


def _is_joined(node: fx.Node, modules: Modules) -> bool:
    """Whether a file has a concatenation for an operator, or for what it computes on with constants."""
    operator, source = operator_of(node, modules), node.args[0] if node.args else None
    if operator is not None and operator.name in ("cat", "stack", "roll", "pad"):
        return True
    return _has_constants(node, modules) and isinstance(source, fx.Node) and _is_joined(source, modules)


def _stays_float(node: fx.Node, modules: Modules) -> bool:
    """Whether an operator computes in float, or should: all but a ReLU, which OpenVINO also computes on integers."""
    decision, operator = decision_on(node), operator_of(node, modules)
    if decision is None:  # it is judged by its results, each of them a node of its own
        return operator is None and any(user.target in (getattr, getitem) and _is_float(user) for user in node.users)
    if decision.verdict not in (Verdict.FLOAT, Verdict.FUSED):
        return False
    return operator is None or operator.limits_of(node, _module(node, modules)) != (0.0, None)


def _has_constants(node: fx.Node, modules: Modules) -> bool:
    """Whether a float operator is a sum or product with constants: a norm that is not folded, or arithmetic."""
    operator = operator_of(node, modules)
    if operator is None or not _stays_float(node, modules):
        return False
    if operator.name == "batch_norm":
        return True
    return operator.name in _ARITHMETIC and any(not _is_computed(a) for a in node.args[:2])


def _joins_quantizer(node: fx.Node, modules: Modules) -> bool:
    """Whether OpenVINO makes a norm part of the quantizer after it, which takes each channel's limits in order."""
    norm = _module(node, modules)
    if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) or norm.running_var is None:
        return False
    after = [_module(user, modules) for user in node.users]
    rising = norm.weight is None or bool((norm.weight > 0).all())
    return rising and len(after) == 1 and isinstance(after[0], TensorQuantizer)


def _is_computed(operand: object) -> bool:
    return isinstance(operand, fx.Node) and not is_constant(operand)


def _is_layer(node: fx.Node, modules: Modules) -> bool:
    operator = operator_of(node, modules)
    return (operator is not None and operator.weight) or isinstance(_module(node, modules), DeployedFunction)


def _is_float_layer(node: fx.Node, modules: Modules) -> bool:
    return _is_layer(node, modules) and not isinstance(_module(node, modules), QuantLayer | DeployedFunction)


def _is_quantized(node: fx.Node, modules: Modules) -> bool:
    """Whether a value comes from a quantizer, possibly through operators that only move it."""
    while not isinstance(_module(node, modules), TensorQuantizer):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _carries(node, modules):
            return False
        node = source
    return True


def _becomes_quantized(node: fx.Node, modules: Modules) -> bool:
    """Whether a layer's result goes to a quantizer, possibly through what a runtime moves or fuses with the layer."""
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
    """Whether a runtime may fuse an operator into the layer before it: one that computes on a single tensor."""
    return sum(facts(source).tensor is not None for source in node.all_input_nodes) == 1


def _scaled_twice(node: fx.Node, modules: Modules) -> bool:
    """Whether OpenVINO (2026.4) would apply a layer's scale twice: a convolution without bias that two read.

    Calls of one layer on one tensor are one in the file. OpenVINO makes several operators of some, such as a norm.
    """
    module = _module(node, modules)
    readers = [(user, twin) for twin in _same_calls(node) for user in twin.users]
    if sum(_reads(*reader) for reader in readers) < 2 and all(_reads_once(user, modules) for user, _ in readers):
        return False
    if isinstance(module, DeployedFunction):
        weight = module.stored.weight
        return isinstance(weight, IntegerTensor) and weight.integers.ndim > 2 and not module.stored.has_bias
    if not isinstance(module, QuantLayer) or isinstance(module, QuantFunction):
        return False
    weight, bias = module.folded_weight()
    return bias is None and weight.ndim > 2


def _reads(user: fx.Node, tensor: fx.Node) -> int:
    """How often a node reads a tensor: a square does so twice."""
    found: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), found.append)
    return found.count(tensor)


def _reads_once(user: fx.Node, modules: Modules) -> bool:
    """Whether a reader is surely a single operator in OpenVINO: a quantizer, a limit, or a result of the graph."""
    operator, module = operator_of(user, modules), _module(user, modules)
    if operator is not None:
        return operator.limits_of(user, module) is not None
    return user.op == "output" or isinstance(module, TensorQuantizer)


def _same_calls(node: fx.Node) -> list[fx.Node]:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return [node]
    same = (node.op, node.target, node.args)
    return [user for user in node.args[0].users if (user.op, user.target, user.args) == same]


def _rounded_average(node: fx.Node, modules: Modules) -> bool:
    """Whether OpenVINO (2026.4) would round an average or sum that stays float, or scale it by other channels' factors.

    It rounds what arithmetic or padding reads. The scales of a linear layer without bias become those of the quantizer
    after the average.
    """
    kind = operator_of(node, modules)
    if kind is None or not ("avg_pool" in kind.name or kind.name in ("mean", "sum")):
        return False
    source = node.args[0]
    while isinstance(source, fx.Node) and _carries(source, modules):
        source = source.args[0]
    of_layer = isinstance(source, fx.Node) and _is_linear(source)
    return of_layer or not all(isinstance(_module(user, modules), TensorQuantizer) for user in node.users)


def _clipped_extreme(node: fx.Node, modules: Modules) -> bool:
    """Whether OpenVINO (2026.4) would clip a largest value at 0, if it is quantized then: it makes both one."""
    operator = operator_of(node, modules)
    if facts(node).tensor is None:
        return False
    if operator is not None and "adaptive_max" in operator.name:
        return True
    source = node.args[0] if node.args and node.target in (getattr, getitem) else node
    return isinstance(source, fx.Node) and source.target in _EXTREMES


def _loses_channels(node: fx.Node, modules: Modules) -> bool:
    """Whether OpenVINO (2026.4) would quantize with the first channel's constant where a constant has several.

    It does so after a reshape to computed sizes, until a convolution or pool tells it more about these.
    """
    operator = operator_of(node, modules)
    if operator is None or operator.name not in _ARITHMETIC or not _stays_float(node, modules):
        return False
    constants = [a for a in node.args[:2] if isinstance(a, fx.Node) and is_constant(a)]
    quantized = any(isinstance(_module(user, modules), TensorQuantizer) for user in node.users)
    if not quantized or all(math.prod(shape_of(constant) or ()) == 1 for constant in constants):
        return False
    waiting, seen = [a for a in node.args[:2] if isinstance(a, fx.Node)], set[fx.Node]()
    while waiting:
        source = waiting.pop()
        kind = operator_of(source, modules)
        if kind is not None and kind.name == "reshape" and any(facts(n).tensor is None for n in source.all_input_nodes):
            return True
        if source not in seen and not (kind is not None and (kind.pool or (kind.weight and kind.rank))):
            waiting += [n for n in source.all_input_nodes if facts(n).tensor is not None]
        seen.add(source)
    return False


_ARITHMETIC = ("add", "sub", "mul", "div")
_EXTREMES = {torch.amax, torch.amin, torch.max, torch.min, "amax", "amin", "max", "min"}
_WRONG_AFTER = (_scaled_twice, _rounded_average, _clipped_extreme, _loses_channels)


def _guard(model: CapturedModel, modules: Modules, tensor: fx.Node, users: list[fx.Node]) -> None:
    name = add_internal(model, GUARDS, tensor.name, KeepFloat())
    modules[name] = model.get_submodule(name)
    with model.graph.inserting_after(tensor):
        guard = model.graph.create_node("call_module", name, (tensor,), name=f"{tensor.name}_kept_float")
    set_facts(guard, tensor=facts(tensor).tensor)
    for user in users:
        user.replace_input_with(tensor, guard)


def _module(node: fx.Node, modules: Modules) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None
