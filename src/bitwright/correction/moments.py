"""Moments: mean and variance of each channel of a tensor, derived from the BatchNorms before it, without data.

A BatchNorm's result has the mean β and the variance γ²·v/(v + eps). It is treated as normal, so a clamp to [l, h], such
as a ReLU, has, with a = (l - μ)/σ, b = (h - μ)/σ, Φ and φ the normal distribution and its density,

    E[y]  = l·Φ(a) + h·(1 - Φ(b)) + μ·(Φ(b) - Φ(a)) + σ·(φ(a) - φ(b))
    E[y²] = l²·Φ(a) + h²·(1 - Φ(b)) + (μ² + σ²)·(Φ(b) - Φ(a)) + 2μσ·(φ(a) - φ(b)) + σ²·(a·φ(a) - b·φ(b))

Other activations are integrated numerically. Means and variances of sums add up, as if the terms were independent.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from bitwright.correction.channel_maps import NormPlace, norm_alone, norm_place
from bitwright.graph.evaluate import call_target
from bitwright.graph.facts import shape_of
from bitwright.graph.names import module_of
from bitwright.graph.walks import first_input, operator_called
from bitwright.nn.channel_limit import ChannelLimit
from bitwright.nn.channels import channel_axis
from bitwright.nn.fold import NORMS
from bitwright.nn.layer import QuantLayer
from bitwright.nn.operators import Operator
from bitwright.quantizer import TensorQuantizer

POINTS, REACH = 2049, 8.0  # points of the numeric integral, over so many standard deviations to each side
KEEPS = ("identity", "dropout", "contiguous")


class Moments(NamedTuple):
    """Mean and variance of each channel; a variance of None is unknown. ``axis`` counts from the last as -1."""

    mean: Tensor
    var: Tensor | None
    axis: int


def clipped(moments: Moments, low: float | None, high: float | Tensor | None) -> Moments:
    """The moments of a normal value clamped to [low, high], one for all channels or each; None for no limit."""
    mean, var, axis = moments
    if var is None:
        return moments
    std = var.sqrt().clamp(min=1e-30)
    inside, first, second = torch.ones_like(mean), torch.zeros_like(mean), torch.zeros_like(mean)
    edges, squares = torch.zeros_like(mean), torch.zeros_like(mean)
    for limit, sign in ((low, 1.0), (high, -1.0)):
        if limit is None:
            continue
        at = (limit - mean) / std
        beyond, density = torch.special.ndtr(sign * at), torch.exp(-at * at / 2) / math.sqrt(2 * math.pi)
        inside, edges, squares = inside - beyond, edges + limit * beyond, squares + limit * limit * beyond
        first = first + sign * density
        second = second + sign * torch.where(density > 0, at * density, 0.0)
    found = edges + mean * inside + std * first
    square = squares + (mean * mean + var) * inside + 2 * mean * std * first + var * second
    return Moments(found, (square - found * found).clamp(min=0), axis)


def integrated(moments: Moments, function: Callable[[Tensor], Tensor]) -> Moments:
    """The moments of a function of a normal value; ``function`` sees (values, channels)."""
    mean, var, axis = moments
    if var is None:
        return moments
    at = torch.linspace(-REACH, REACH, POINTS, dtype=mean.dtype, device=mean.device)[:, None]
    density = torch.exp(-at * at / 2)
    density = density / density.sum()
    values = function((mean + at * var.sqrt()).float()).to(mean)
    found = (values * density).sum(0)
    return Moments(found, ((values - found).square() * density).sum(0), axis)


class Expected:
    """What is known about the tensors in a prepared graph with its current parameters."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.model = model
        self.found: dict[fx.Node, Moments] = {}
        with torch.no_grad():
            for node in model.graph.nodes:
                moments = self._of(node, module_of(node, model))
                if moments is not None:
                    self.found[node] = moments

    def of(self, node: fx.Node | None) -> Moments | None:
        """The moments of a node's result, or None where nothing is known."""
        return None if node is None else self.found.get(node)

    def _of(self, node: fx.Node, module: Any) -> Moments | None:  # noqa: ANN401
        if isinstance(module, QuantLayer):
            place = norm_place(module)
            return None if place is None else _normalized(place, channel_axis(module))
        if isinstance(module, NORMS) and module.running_mean is not None:
            return _normalized(norm_alone(module), 1 - len(shape_of(node) or (0, 0)))
        before = self.of(first_input(node))
        if isinstance(module, TensorQuantizer) or before is None:
            return before
        kind = operator_called(node, module)
        return None if kind is None else self._through(node, module, kind, before)

    def _through(self, node: fx.Node, module: nn.Module | None, kind: Operator, before: Moments) -> Moments | None:
        if kind.name == "add":
            return self._sum(node)
        limits = kind.limits_of(node, module)
        if kind.activation and before.var is None:
            return None
        if isinstance(module, ChannelLimit):
            return clipped(before, 0.0, module.high.flatten().to(before.mean))
        if limits is not None:
            return clipped(before, *limits)
        if kind.activation:
            return integrated(before, lambda x: _call(node, module, x))
        if kind.name in KEEPS:
            return before
        return self._averaged(node, module, kind, before)

    def _averaged(self, node: fx.Node, module: nn.Module | None, kind: Operator, before: Moments) -> Moments | None:
        """Averages over whole planes have the same mean, in whatever shape, and so does a plane of one value."""
        channels = len(before.mean)
        shape, given = shape_of(node) or (), shape_of(first_input(node)) or ()
        if len(shape) < 2 or not given or shape[1] != channels:
            return None
        single = kind.rearranges and math.prod(given) == given[0] * channels
        mean = kind.name == "mean" and math.prod(shape) == shape[0] * channels
        if single or mean or kind.averages_planes_of(node, module):
            return Moments(before.mean, before.var if single else None, 1 - len(shape))
        return None

    def _sum(self, node: fx.Node) -> Moments | None:
        terms = [self.found[n] for n in node.args if isinstance(n, fx.Node) and n in self.found]
        if len(terms) != 2 or node.kwargs:
            return None
        one, two = terms
        if one.axis != two.axis or one.mean.shape != two.mean.shape:
            return None
        known = one.var is not None and two.var is not None
        return Moments(one.mean + two.mean, one.var + two.var if known else None, one.axis)  # pyrefly: ignore


def _normalized(place: NormPlace, axis: int) -> Moments:
    norm: Any = place.norm
    mean, var = (place.of_layer(v.detach()).double() for v in (norm.running_mean, norm.running_var))
    factor = place.factor.double()
    return Moments(mean * factor + place.shift.double(), var * factor.square(), axis)


def _call(node: fx.Node, module: nn.Module | None, x: Tensor) -> Tensor:
    if module is not None:
        return module(x)
    rest = tuple(x if i == 0 else a for i, a in enumerate(node.args))
    return call_target(node.target, rest or (x,), {k: v for k, v in node.kwargs.items() if k != "input"})
