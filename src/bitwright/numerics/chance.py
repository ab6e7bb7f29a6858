"""Rounding up or down by chance, and quantizing values by chance.

Stochastic rounding, with u uniform in [0, 1):

    y = (clamp(floor(x / scale + u) + zero_point, qmin, qmax) - zero_point) · scale,    E[y] = x inside the range
    dx = g where qmin <= round(x / scale) + zero_point <= qmax, else 0

u has 16 bits, and is not kept: the gradient does not depend on it.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.operator import WHERE, Arranged, define_operator, wide


def dice(x: Tensor) -> Tensor:
    """A random int16 for each value of ``x``, four from each draw: far faster than ``rand`` or ``bernoulli``."""
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    return draws.view(torch.int16)[: x.numel()].view(x.shape)


def chosen(x: Tensor, probability: float) -> Tensor:
    """A mask that is true for each value of ``x`` with the given probability, to 16 bits."""
    sides = round(probability * 2**16)
    return dice(x) <= sides - 2**15 - 1 if sides else torch.zeros_like(x, dtype=torch.bool)


@Fused
def _values(x: Tensor, noise: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    values = wide(x)
    s, z = scale.to(values.dtype), zero_point.to(values.dtype)
    chance = noise.to(values.dtype) * 2.0**-16 + (0.5 + 2.0**-17)
    q = (torch.floor(torch.div(values, s) + chance) + z).clamp(qmin, qmax)
    return ((q - z) * s).to(x.dtype)


def _forward(
    x: Tensor,
    noise: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int | None = None,
) -> Tensor:
    if not x.numel():
        return x.clone()
    at = Arranged.of(x.detach(), axis, group)
    params = (at.param(p) for p in (scale, zero_point))
    return at.view.restore(_values(at.view.values, at.like(noise, x), *params, qmin, qmax))


def _backward(
    grad: Tensor,
    x: Tensor,
    noise: None,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    return torch.ops.bitwright.quantize_dequantize_backward(grad, x, scale, zero_point, qmin, qmax, axis, group)


stochastic_quantize = define_operator(
    "stochastic_quantize",
    f"Tensor? noise, Tensor scale, Tensor zero_point, int qmin, int qmax, {WHERE}",
    _forward,
    _backward,
    learned=0,
)
