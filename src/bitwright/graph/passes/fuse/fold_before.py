"""Fold a BatchNorm, or sums and products with constants, into the layer after them:  linear(bn(x))  ->  linear'(x).

With the map of each input channel written as  x·c + d:

    w' = w · c,   b' = b + Σ w · d

This is exact only if the shift reaches every output equally. So a shift can move into linear layers and into
convolutions without padding or that pad with their own values, but not into those that pad with zeros (the padding
would be shifted too) or that are transposed. A factor alone can move into all of them. While its weight is float, the
layer computes the original form, bit for bit.

Once folded, the tensor before the norm is quantized, with one scale for all channels. If the factors c differ much,
some channels would be left with few integers, so a map whose largest factor is more than ``spread`` times its
smallest is not folded:  ``fold_before: {spread: 100}``.
"""

from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.build import argument
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import InputMatchType, MatcherNode
from bitwright.graph.names import node_name
from bitwright.graph.passes.fold.arithmetic import OPERATORS, Arithmetic
from bitwright.graph.passes.fold.pattern import FoldPattern, is_layer
from bitwright.graph.rewriting.answers import answers_of
from bitwright.graph.rewriting.replace import Called, Nodes
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import first_input
from bitwright.nn.channels import channel_axis, input_channels
from bitwright.nn.fold import NORMS, Fold, NormFold
from bitwright.nn.layer import QuantLayer

_OURS = ("bitwright.nn.conv", "bitwright.nn.linear")  # layers whose forward applies what is folded before them


@register_schedule("fold_before", stage="fuse", after=("fold_batchnorm", "fold_scale"))
class ReplacePattern(FoldPattern):
    """Fold what precedes a layer, nearest first, and say why the rest stays.

    Args:
        spread: the largest allowed ratio between the largest and the smallest factor of a channel.
    """

    def __init__(self, spread: float = 8.0) -> None:
        self.spread = spread

    def make_ops(self) -> list[MatcherNode]:
        return [
            MatcherNode("before", None, [*OPERATORS, "op:batch_norm", nn.SyncBatchNorm], _is_norm_or_arithmetic),
            MatcherNode(
                "layer",
                ["before"],
                QuantLayer,
                lambda _, module: is_layer(module),
                InputMatchType.FIRST,
                subclasses=True,
            ),
        ]

    def make_joint_checkers(self) -> list[Any]:
        """The map must be per input channel of the layer, with factors of about the same size."""
        return [(("before", "layer"), self._fits)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, *_: object) -> dict[str, fx.Node]:
        """Add the fold to the layer, which then reads the node before."""
        before, layer = nodes_dict["before"], modules_dict["layer"]
        layer.before = (self._fold(before, modules_dict["before"], layer), *layer.before)
        self.note(f"folded {node_name(before)} into {nodes_dict['layer'].target} after it")
        found = Arithmetic.read(before)
        return {"before": argument(before, 0, "input") if found is None else found.tensor}

    def _fold(self, node: fx.Node, module: Any, layer: QuantLayer) -> Fold:
        found = Arithmetic.read(node)
        return NormFold(module) if found is None else found.fold(self.model, channel_axis(layer))

    def _fits(self, before: fx.Node, layer: fx.Node, modules: dict[str, Any]) -> bool | str:
        found = Arithmetic.read(before)
        if first_input(layer) is not before:
            return False
        reason = self._why_apart(before, layer, modules) or self._why_not_channels(before, found, modules)
        if reason is None:
            ratio = _spread(self._fold(before, modules["before"], modules["layer"]), modules["layer"])
            alike = answers_of(self.model).setdefault(f"fold {before.name} into {layer.target}", ratio <= self.spread)
            reason = None if alike else f"its factors differ by up to {ratio:.0f} times"
        return True if reason is None else f"{node_name(before)} into {layer.target}, {reason}"

    def _why_apart(self, before: fx.Node, layer: fx.Node, modules: dict[str, Any]) -> str | None:
        if any(len(self.calls.get(module, ())) > 1 for module in modules.values()):
            return "it or the layer after it is called more than once"
        if len(before.users) > 1:
            return f"it has {len(before.users)} users"
        if facts(before).written or facts(layer).written:
            return "it shares memory with a tensor that is written to in place"
        ours = type(modules["layer"]).__module__ in _OURS
        return None if ours else f"{type(modules['layer']).__name__} is not one of Bitwright's layers"

    def _why_not_channels(self, before: fx.Node, found: Arithmetic | None, modules: dict[str, Any]) -> str | None:
        """Why a norm or arithmetic is not a map of the layer's input channels that is the same for all outputs."""
        axis = channel_axis(modules["layer"])
        if found is not None and found.divides_by_tensor:
            return "it divides by the layer's input"
        if found is not None:
            reason = found.why_not(axis, lambda: self.written)
            return reason or (_why_no_shift(modules["layer"]) if found.shifts else None)
        if modules["before"].running_mean is None:
            return "it has no running statistics"
        if len(shape_of(before) or ()) + axis != 1:
            return "it normalises an axis other than the one the layer sums over"
        return _why_no_shift(modules["layer"])


def _is_norm_or_arithmetic(node: fx.Node, module: object) -> bool:
    return isinstance(module, NORMS) or Arithmetic.read(node) is not None


def _spread(fold: Fold, layer: QuantLayer) -> float:
    """The ratio between a fold's largest and smallest factor, ignoring zeros."""
    with torch.no_grad():
        factors = fold.affine(input_channels(layer), layer.weight)[0].abs()
    factors = factors[factors > 0]
    return float(factors.max() / factors.min()) if len(factors) else 1.0


def _why_no_shift(layer: Any) -> str | None:
    """Why a shift of the input does not shift every output of a layer equally, or None."""
    if isinstance(layer, nn.Linear):
        return None
    if layer.transposed:
        return "a transposed convolution does not apply its shift equally everywhere"
    padded = layer.padding == "same" or (layer.padding != "valid" and any(layer.padding))
    return "the layer pads with zeros, which it would shift" if padded and layer.padding_mode == "zeros" else None
