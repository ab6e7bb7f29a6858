"""Rounding up or down by chance, and quantizing values by chance.

Stochastic rounding, with u uniform in [0, 1):

    y = (clamp(floor(x / scale + u) + zero_point, qmin, qmax) - zero_point) · scale,    E[y] = x inside the range
    dx = g where qmin <= round(x / scale) + zero_point <= qmax, else 0

u has 16 bits, and is not kept: the gradient does not depend on it.

Quantizing by chance (QDrop), with m = 1 for the values that are quantized, else 0, and with the values y and gradients
of :mod:`bitwright.numerics.clipped`:

    out = m·y + (1 - m)·x,    dx = g where m = 0, else clipped's,    step, low, high: clipped's of the gradient m·g

m is kept, in one byte for each value.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.operator import WHERE, Arranged, define_operator, total, wide


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


def _as_mask(some: Tensor, values: Tensor) -> Tensor:
    """Bytes as a mask, by way of floats: compiled masks of bool or integers are not vectorised, and 3 times slower."""
    return some.to(values.dtype) > 0.5


def _as_bytes(at: Arranged, some: Tensor, x: Tensor) -> Tensor:
    return at.like(some, x).view(torch.uint8)


@Fused
def _some_values(x: Tensor, some: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    values = wide(x)
    s, z = step.to(values.dtype), zero_point.to(values.dtype)
    q = (torch.round(torch.div(values, s)) + z).clamp(qmin, qmax)
    return torch.where(_as_mask(some, values), (q - z) * s, values).to(x.dtype)


@Fused
def _some_gradients(
    x: Tensor, grad: Tensor, some: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, g = wide(x), wide(grad)
    s, z = step.to(values.dtype), zero_point.to(values.dtype)
    v = torch.div(values, s)
    mask = _as_mask(some, values)
    below, above = (v + z < qmin) & mask, (v + z > qmax) & mask
    outside = below | above
    return (
        grad * ~outside,
        total(torch.where(mask & ~outside, g * (torch.round(v) - v), 0.0)),
        total(torch.where(below, g, 0.0)),
        total(torch.where(above, g, 0.0)),
    )


def _some_forward(
    x: Tensor,
    step: Tensor,
    low: Tensor,
    high: Tensor,
    zero_point: Tensor,
    some: Tensor,
    qmin: int,
    qmax: int,
    factor: float = 1.0,
    axis: int | None = None,
    group: int | None = None,
) -> Tensor:
    if not x.numel():
        return x.clone()
    at = Arranged.of(x.detach(), axis, group)
    params = (at.param(p.detach()) for p in (step, zero_point))
    return at.view.restore(_some_values(at.view.values, _as_bytes(at, some, x), *params, qmin, qmax))


def _some_backward(
    grad: Tensor,
    x: Tensor,
    step: Tensor,
    low: Tensor,
    high: Tensor,
    zero_point: Tensor,
    some: Tensor,
    qmin: int,
    qmax: int,
    factor: float = 1.0,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    if not x.numel():
        return [grad.clone(), *(torch.zeros_like(p) for p in (step, low, high))]
    at = Arranged.of(x, axis, group)
    params = (at.param(p) for p in (step, zero_point))
    grad_x, *sums = _some_gradients(at.view.values, at.like(grad, x), _as_bytes(at, some, x), *params, qmin, qmax)
    ends = (at.gradient(t, p).mul_(factor) for t, p in zip(sums, (step, low, high), strict=True))
    return [at.view.restore(grad_x), *ends]


quantize_some = define_operator(
    "quantize_some",
    "Tensor step, Tensor low, Tensor high, Tensor zero_point, Tensor some, int qmin, int qmax, float factor=1.0, "
    + WHERE,
    _some_forward,
    _some_backward,
    learned=3,
)
