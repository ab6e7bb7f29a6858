"""Rounding up or down by chance, and quantizing values by chance.

Stochastic rounding, with u uniform in (0, 1), v = x / scale and f = v - floor(v):

    y = (clamp(floor(v) + [u < f] + zero_point, qmin, qmax) - zero_point) · scale,    E[y] = x inside the range
    dx = g where qmin <= round(v) + zero_point <= qmax, else 0

Quantizing by chance (QDrop), with m = 1 for the values that are quantized, else 0, and with the values y and gradients
of :mod:`bitwright.numerics.clipped`:

    out = m·y + (1 - m)·x,    dx = g where m = 0, else clipped's,    step, low, high: clipped's of the gradient m·g

u and m come from a key and are not kept; see :mod:`bitwright.numerics.noise`.
"""

import torch
from torch import Tensor

from bitwright.numerics.clipped import gradients_of
from bitwright.numerics.fused import Fused
from bitwright.numerics.noise import noise
from bitwright.numerics.operator import WHERE, Arranged, define_operator, wide


@Fused
def _values(x: Tensor, key: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    values = wide(x)
    s, z = scale.to(values.dtype), zero_point.to(values.dtype)
    v = torch.div(values, s)
    down = torch.floor(v)
    q = torch.where(noise(values, key) < v - down - 0.5, down + 1.0, down)
    return (((q + z).clamp(qmin, qmax) - z) * s).to(x.dtype)


def _forward(
    x: Tensor,
    key: Tensor,
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
    return at.view.restore(_values(at.view.values, key, *params, qmin, qmax))


def _backward(
    grad: Tensor,
    x: Tensor,
    key: Tensor,
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
    f"Tensor key, Tensor scale, Tensor zero_point, int qmin, int qmax, {WHERE}",
    _forward,
    _backward,
    learned=0,
)


@Fused
def _some_values(
    x: Tensor, key: Tensor, odds: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int
) -> Tensor:
    values = wide(x)
    s, z = step.to(values.dtype), zero_point.to(values.dtype)
    q = (torch.round(torch.div(values, s)) + z).clamp(qmin, qmax)
    return torch.where(noise(values, key) < odds, (q - z) * s, values).to(x.dtype)


@Fused
def _some_gradients(
    x: Tensor, grad: Tensor, key: Tensor, odds: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, g = wide(x), wide(grad)
    some = noise(values, key) < odds
    inside, step_sum, below, above = gradients_of(values, torch.where(some, g, 0.0), step, zero_point, qmin, qmax)
    return torch.where(some, inside, g).to(grad.dtype), step_sum, below, above


def _odds(x: Tensor, probability: float) -> Tensor:
    """What noise is below with this probability."""
    return torch.full((), probability - 0.5, dtype=wide(x).dtype, device=x.device)


def _some_forward(
    x: Tensor,
    step: Tensor,
    low: Tensor,
    high: Tensor,
    zero_point: Tensor,
    key: Tensor,
    probability: float,
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
    return at.view.restore(_some_values(at.view.values, key, _odds(x, probability), *params, qmin, qmax))


def _some_backward(
    grad: Tensor,
    x: Tensor,
    step: Tensor,
    low: Tensor,
    high: Tensor,
    zero_point: Tensor,
    key: Tensor,
    probability: float,
    qmin: int,
    qmax: int,
    factor: float = 1.0,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    if not x.numel():
        return [grad.clone(), *(torch.zeros_like(p) for p in (step, low, high))]
    at = Arranged.of(x, axis, group)
    given = (key, _odds(x, probability), at.param(step), at.param(zero_point))
    grad_x, *sums = _some_gradients(at.view.values, at.like(grad, x), *given, qmin, qmax)
    ends = (at.gradient(t, p).mul_(factor) for t, p in zip(sums, (step, low, high), strict=True))
    return [at.view.restore(grad_x), *ends]


quantize_some = define_operator(
    "quantize_some",
    "Tensor step, Tensor low, Tensor high, Tensor zero_point, Tensor key, float probability, int qmin, int qmax, "
    f"float factor=1.0, {WHERE}",
    _some_forward,
    _some_backward,
    learned=3,
)
