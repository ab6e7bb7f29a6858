"""Rounding to levels at whole numbers that are not evenly spaced, found in a table (APoT).

``table[j]`` is the level (from 0 to 1) nearest to magnitudes in [j, j + 1) / (len(table) - 1). Where all levels are
whole multiples of 1/n, a table of 2n + 1 cells knows every bound between them exactly. With v = x / scale:

    y = scale·sign(v)·table[floor(|v|·2n)],   |v| clipped to 1, and v to 0 from below if not ``signed``

    x      g where the clip does not act, else 0
    scale  Σ g·(y - x) / scale where the clip does not act,  Σ g·sign(v) or 0 where it does

One table look-up per value: nothing of size values × levels is made.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.operator import WHERE, Arranged, define_operator, total, wide


@Fused
def _values(x: Tensor, scale: Tensor, table: Tensor, lowest: Tensor) -> Tensor:
    values = wide(x)
    v = torch.div(values, scale).clamp(max=1.0).maximum(lowest)
    level = table[(v.abs() * (table.shape[0] - 1)).to(torch.int32)]
    return (torch.where(v < 0, -level, level) * scale).to(x.dtype)


@Fused
def _gradients(x: Tensor, grad: Tensor, scale: Tensor, table: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
    values, g = wide(x), wide(grad)
    raw = torch.div(values, scale)
    v = raw.clamp(max=1.0).maximum(lowest)
    level = table[(v.abs() * (table.shape[0] - 1)).to(torch.int32)]
    inside = raw == v
    change = torch.where(v < 0, -level, level) - torch.where(inside, v, 0.0)
    return grad * inside, total(g * change)


def nearest(levels: Tensor) -> Tensor:
    """The table of sorted ``levels`` from 0 to a whole number n, all whole numbers, in units of n."""
    n = int(levels[-1])
    places = torch.arange(2 * n + 1, device=levels.device, dtype=levels.dtype) / 2 + 0.25
    bounds = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize(places, bounds)] / n


def _arrange(
    x: Tensor, scale: Tensor, table: Tensor, signed: bool, axis: int | None, group: int | None
) -> tuple[Arranged, tuple[Tensor, Tensor, Tensor]]:
    at = Arranged.of(x, axis, group)
    dtype = wide(x).dtype
    lowest = torch.full((), -1.0 if signed else 0.0, dtype=dtype, device=x.device)
    return at, (at.param(scale.detach()).to(dtype), table.to(dtype), lowest)


def _forward(
    x: Tensor,
    scale: Tensor,
    table: Tensor,
    signed: bool,
    factor: float = 1.0,
    axis: int | None = None,
    group: int | None = None,
) -> Tensor:
    if not x.numel():
        return x.clone()
    at, params = _arrange(x.detach(), scale, table, signed, axis, group)
    return at.view.restore(_values(at.view.values, *params))


def _backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    table: Tensor,
    signed: bool,
    factor: float = 1.0,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    if not x.numel():
        return [grad.clone(), torch.zeros_like(scale)]
    at, params = _arrange(x, scale, table, signed, axis, group)
    grad_x, sums = _gradients(at.view.values, at.like(grad, x), *params)
    return [at.view.restore(grad_x), at.gradient(sums, scale).mul_(factor)]


level_quantize = define_operator(
    "level_quantize",
    f"Tensor scale, Tensor table, bool signed, float factor=1.0, {WHERE}",
    _forward,
    _backward,
    learned=1,
)
