"""Fold sums and products with constants into the layer before them:  conv(x)·c + d  ->  conv'(x).

    w' = w · c,   b' = b · c + d

The constants are numbers, or parameters and buffers with one value per output channel: layer scale, frozen norms that
are written out, learned gains. They keep their places and names and go on training. As with a BatchNorm, the layer
computes them as they were while its weight is float, bit for bit, and multiplies them in once it is quantized. Between
the layer and the constant there may be a permutation or dropout, which the product moves past.
"""

from collections import Counter

from torch import fx, nn

from bitwright.graph.build import module_of, replace
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.passes.fold.constants import (
    ARITHMETIC,
    as_constant,
    read_constant,
    why_not_constant,
    why_not_per_channel,
)
from bitwright.graph.passes.simplify.merge_reshapes import permutation
from bitwright.graph.purity import written_attributes
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.fold import ArithmeticFold
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer
from bitwright.nn.operators import operator_of


@register_schedule("fold_scale", stage="fuse", after="fold_batchnorm")
def fold_scale(model: CapturedModel) -> list[str]:
    """Fold every constant after a layer that can be, and say why the others cannot."""
    calls = Counter(str(n.target) for n in model.graph.nodes if n.op == "call_module")
    modules = dict(model.named_modules())
    written = written_attributes(model)
    notes = []
    for node in list(model.graph.nodes):
        found = read_constant(node)
        if found is None:
            continue
        tensor, constant, first = found
        before, axis = _layer_before(tensor, modules, only_scale=ARITHMETIC[node.target].__name__ in ("mul", "div"))
        layer = module_of(before, model)
        if not isinstance(layer, QuantLayer) or isinstance(layer, QuantFunction):
            continue
        reason = why_not_constant(constant, written) or _why_not(node, tensor, constant, first, before, axis, calls)
        if reason:
            notes.append(f"not folded: {node.name} into {before.target}, {reason}")
            continue
        value = as_constant(model, constant)
        fold = ArithmeticFold(ARITHMETIC[node.target], value, first, _channel_axis(before, modules))
        layer.after = (*layer.after, fold)
        replace(node, tensor)
        notes.append(f"folded {node.name} into {before.target}")
    return notes


def _layer_before(tensor: fx.Node, modules: dict[str, nn.Module], *, only_scale: bool) -> tuple[fx.Node, int]:
    """The node before permutations and dropout, each read by one other, and where its channels are in ``tensor``."""
    chain = []
    node = tensor
    while len(node.users) == 1 and node.args and isinstance(node.args[0], fx.Node):
        kind = operator_of(node, modules)
        drops = kind is not None and kind.name == "dropout" and only_scale
        if not drops and permutation(node) is None:
            break
        chain.append(node)
        node = node.args[0]
    rank = len(shape_of(node) or ())
    axis = _channel_axis(node, modules) % rank if rank else 0
    for step in reversed(chain):
        order = permutation(step)
        axis = order.index(axis) if order is not None else axis
    return node, axis - rank


def _channel_axis(node: fx.Node, modules: dict[str, nn.Module]) -> int:
    """Which axis of a layer's result has its channels, counted from the last, -1."""
    kind = operator_of(node, modules)
    return kind.channel_axis if kind is not None and kind.weight else -1


def _why_not(
    node: fx.Node,
    tensor: fx.Node,
    constant: object,
    first: bool,
    before: fx.Node,
    axis: int,
    calls: Counter[str],
) -> str | None:
    if ARITHMETIC[node.target].__name__ == "div" and first:
        return "it divides by the layer's result"
    if len(before.users) > 1:
        return f"{before.target} has {len(before.users)} users"
    if len(tensor.users) > 1:
        return f"{tensor.name} has {len(tensor.users)} users"
    if calls[str(before.target)] > 1:
        return f"{before.target} is called more than once"
    if facts(node).written or facts(tensor).written:
        return "it shares memory with a tensor that is written to in place"
    if facts(node).tensor != facts(tensor).tensor:
        return "the constant changes the shape or type of the result"
    return why_not_per_channel(constant, tensor, axis)
