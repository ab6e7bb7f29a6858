"""Fold a BatchNorm, or sums and products with constants, into the layer after them:  linear(bn(x))  ->  linear'(x).

With the map of each input channel written as  x·c + d:

    w' = w · c,   b' = b + Σ w · d

That is exact only if every output sees the shift in the same way. So a shift goes into linear layers and into
convolutions that pad with nothing or with their own values, not into those that pad with zeros (the padding would be
shifted too) or that are transposed; a factor alone goes into all of them. The layer computes the original form while
its weight is float, bit for bit.

Once folded, it is the tensor before the norm that is quantized, with one scale for all channels. Where the factors c
differ much, some channels would be left with few integers, so those whose largest is more than ``spread`` times their
smallest stay:  ``fold_before: {spread: 100}``.
"""

from collections import Counter
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.build import argument, module_of, replace
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.passes.fold.constants import (
    ARITHMETIC,
    as_constant,
    read_constant,
    why_not_constant,
    why_not_per_channel,
)
from bitwright.graph.purity import written_attributes
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.channels import channel_axis, input_channels
from bitwright.nn.fold import NORMS, ArithmeticFold, Fold, NormFold
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer

_OURS = ("bitwright.nn.conv", "bitwright.nn.linear")  # layers whose forward applies what is folded before them


@register_schedule("fold_before", stage="fuse", after=("fold_batchnorm", "fold_scale"))
def fold_before(model: CapturedModel, spread: float = 8.0) -> list[str]:
    """Fold what stands before a layer, the nearest first, and say why what could not be stays.

    Args:
        model: the model.
        spread: how many times the smallest factor of a channel the largest may be.
    """
    calls = Counter(str(n.target) for n in model.graph.nodes if n.op == "call_module")
    written = written_attributes(model)
    notes = []
    for node in list(model.graph.nodes):
        layer = module_of(node, model)
        if not isinstance(layer, QuantLayer) or isinstance(layer, QuantFunction):
            continue
        while isinstance(before := argument(node, 0, "input"), fx.Node):
            norm, found = module_of(before, model), read_constant(before)
            if not isinstance(norm, NORMS) and found is None:
                break
            name = str(before.target) if norm is not None else before.name
            reason = None if found is None else why_not_constant(found[1], written)
            reason = reason or _why_not(node, layer, before, norm, found, calls)
            if reason:
                notes.append(f"not folded: {name} into {node.target}, {reason}")
                break
            tensor = argument(before, 0, "input") if found is None else found[0]
            fold = NormFold(norm) if isinstance(norm, NORMS) else _arithmetic(model, layer, before, found)
            ratio = _spread(fold, layer)
            if ratio > spread:
                notes.append(f"not folded: {name} into {node.target}, its factors differ {ratio:.0f} times")
                break
            layer.before = (fold, *layer.before)
            replace(before, tensor)
            notes.append(f"folded {name} into {node.target} after it")
    return notes


def _why_not(
    node: fx.Node,
    layer: QuantLayer,
    before: fx.Node,
    norm: nn.Module | None,
    found: tuple[fx.Node, object, bool] | None,
    calls: Counter[str],
) -> str | None:
    if calls[str(node.target)] > 1 or (norm is not None and calls[str(before.target)] > 1):
        return "it or the layer after it is called more than once"
    if len(before.users) > 1:
        return f"it has {len(before.users)} users"
    if facts(before).written or facts(node).written:
        return "it shares memory with a tensor that is written to in place"
    if type(layer).__module__ not in _OURS:
        return f"{type(layer).__name__} is not one of Bitwright's layers"
    axis = channel_axis(layer)
    if found is None:
        if norm is None or norm.running_mean is None:
            return "it has no running statistics"
        if len(shape_of(before) or ()) + axis != 1:
            return "it normalises another axis than the one the layer sums over"
        return _why_no_shift(layer)
    tensor, constant, first = found
    kind = ARITHMETIC[before.target].__name__
    if kind == "div" and first:
        return "it divides by the layer's input"
    if facts(before).tensor != facts(tensor).tensor:
        return "the constant changes the shape or type of the result"
    return why_not_per_channel(constant, tensor, axis) or (_why_no_shift(layer) if kind in ("add", "sub") else None)


def _arithmetic(model: CapturedModel, layer: QuantLayer, before: fx.Node, found: Any) -> ArithmeticFold:
    """A sum or product with a constant as a fold."""
    return ArithmeticFold(ARITHMETIC[before.target], as_constant(model, found[1]), found[2], channel_axis(layer))


def _spread(fold: Fold, layer: QuantLayer) -> float:
    """How many times its smallest factor the largest factor of a fold is; those that are zero do not count."""
    with torch.no_grad():
        factors = fold.affine(input_channels(layer), layer.weight)[0].abs()
    factors = factors[factors > 0]
    return float(factors.max() / factors.min()) if len(factors) else 1.0


def _why_no_shift(layer: Any) -> str | None:
    """Why a shift of the input is not the same shift for every output of a layer, or None."""
    if isinstance(layer, nn.Linear):
        return None
    if layer.transposed:
        return "a transposed convolution does not see its shift at every place alike"
    padded = layer.padding == "same" or (layer.padding != "valid" and any(layer.padding))
    return "the layer pads with zeros, which it would shift" if padded and layer.padding_mode == "zeros" else None
