"""Rounding that is learned, one variable V for each value (AdaRound).

With h(V) = clamp(σ(V)·(ζ - γ) + γ, 0, 1), ζ = 1.1, γ = -0.1, which is 0 for "down" and 1 for "up":

    y = (clamp(floor(x / scale) + zero_point + h(V), qmin, qmax) - zero_point) · scale

    V  g·scale·σ(V)·(1 - σ(V))·(ζ - γ)   where 0 < h < 1 and the clamp does not act, else 0
    x  g where the clamp does not act, else 0

σ(V) = (1 + tanh(V / 2)) / 2, by :mod:`bitwright.numerics.hyperbolic`: eager and compiled kernels give the same bits.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.hyperbolic import tanh_and_slope
from bitwright.numerics.operator import WHERE, Arranged, define_operator, wide

ZETA, GAMMA = 1.1, -0.1


def fraction(rounding: Tensor) -> Tensor:
    """h(V), between 0 and 1."""
    return (torch.sigmoid(rounding) * (ZETA - GAMMA) + GAMMA).clamp(0.0, 1.0)


def _fraction_and_slope(rounding: Tensor) -> tuple[Tensor, Tensor]:
    """h(V), and its slope where it is neither 0 nor 1."""
    t, slope = tanh_and_slope(rounding * 0.5)
    return (t * 0.6 + 0.5).clamp(0.0, 1.0), slope * 0.3  # (ζ - γ) / 2, and its half


@Fused
def _values(x: Tensor, rounding: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    values = wide(x)
    s, z = scale.to(values.dtype), zero_point.to(values.dtype)
    h, _ = _fraction_and_slope(rounding.to(values.dtype))
    q = (torch.floor(torch.div(values, s)) + z + h).clamp(qmin, qmax)
    return ((q - z) * s).to(x.dtype)


@Fused
def _hard(x: Tensor, rounding: Tensor, scale: Tensor) -> Tensor:
    values = wide(x)
    s = scale.to(values.dtype)
    return ((torch.floor(torch.div(values, s)) + (rounding >= 0)) * s).to(x.dtype)


def rounded_by_sign(x: Tensor, rounding: Tensor, scale: Tensor, axis: int | None, group: int | None) -> Tensor:
    """``x`` at whole numbers of scales, rounded up where V >= 0, else down; no gradient."""
    if not x.numel():
        return x.clone()
    at = Arranged.of(x.detach(), axis, group)
    return at.view.restore(_hard(at.view.values, at.like(rounding.detach(), x), at.param(scale)))


@Fused
def _gradients(
    x: Tensor, grad: Tensor, rounding: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor]:
    values, g = wide(x), wide(grad)
    s, z = scale.to(values.dtype), zero_point.to(values.dtype)
    h, slope = _fraction_and_slope(rounding.to(values.dtype))
    q = torch.floor(torch.div(values, s)) + z + h
    inside = torch.where((q >= qmin) & (q <= qmax), g, 0.0)
    return inside.to(grad.dtype), torch.where((h > 0.0) & (h < 1.0), inside * s * slope, 0.0).to(rounding.dtype)


def _forward(
    x: Tensor,
    rounding: Tensor,
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
    return at.view.restore(_values(at.view.values, at.like(rounding.detach(), x), *params, qmin, qmax))


def _backward(
    grad: Tensor,
    x: Tensor,
    rounding: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    if not x.numel():
        return [grad.clone(), torch.zeros_like(rounding)]
    at = Arranged.of(x, axis, group)
    params = (at.param(p) for p in (scale, zero_point))
    gradients = _gradients(at.view.values, at.like(grad, x), at.like(rounding, x), *params, qmin, qmax)
    grad_x, grad_rounding = (at.view.restore(g) for g in gradients)
    return [grad_x, grad_rounding]


learned_rounding = define_operator(
    "learned_rounding",
    f"Tensor rounding, Tensor scale, Tensor zero_point, int qmin, int qmax, {WHERE}",
    _forward,
    _backward,
    learned=1,
)
