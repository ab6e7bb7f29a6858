"""Differentiable soft quantization (DSQ): rounding forward, the slope of a staircase of tanh backward.

Values are those of ``quantize_dequantize`` with step Δ. For the gradient, with Q = qmax - qmin steps between the ends
low and high, v = (x - low) / Δ counted in steps, i = floor(v) and f = v - i - ½, the staircase is

    σ(v) = i + (S·tanh(K·f) + 1) / 2,    S = 1 / (1 - α),  K = ln(2 / α - 1),    y = low + Δ·σ(v)

    x      σ' = S·K·(1 - tanh²(K·f)) / 2                               0 outside [low, high]
    α      Δ/2 · (S²·tanh(K·f) - S·(1 - tanh²(K·f))·f·2 / (α·(2 - α)))  0 outside
    high   (σ - v·σ') / Q                                               1 above, 0 below
    low    1 - σ/Q - σ'·(1 - v/Q)                                       1 below, 0 above

Sums of compiled and of eager kernels may differ in the last bits.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.hyperbolic import tanh_and_slope
from bitwright.numerics.operator import WHERE, Arranged, define_operator, total, wide
from bitwright.numerics.qdq import quantize_dequantize


@Fused
def _gradients(
    x: Tensor, grad: Tensor, k: Tensor, gain: Tensor, bend: Tensor, step: Tensor, start: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of 2α / Δ, of low and of high; see :func:`_constants` for what comes in."""
    values, g = wide(x), wide(grad)
    v = torch.div(values, step) + start
    below, above = v < 0, v > steps
    i = torch.floor(v).clamp(min=0).minimum(steps - 1)
    f = v - i - 0.5
    t, bend_of_t = tanh_and_slope(f * k)
    t, bump = t * gain, bend_of_t * gain
    slope = bump * (0.5 * k)
    rest = torch.where(below | above, 0.0, g)
    rise = (i + 0.5 * (t + 1.0) - v * slope) * (1.0 / steps)
    return (
        (rest * slope).to(grad.dtype),
        total(rest * (gain * t - bump * f * bend)),
        total(torch.where(below, g, rest * (1.0 - slope - rise))),
        total(torch.where(above, g, rest * rise)),
    )


def _constants(at: Arranged, alpha: Tensor, step: Tensor, zero_point: Tensor, ends: tuple[int, int]) -> list[Tensor]:
    """K, S, 2 / (α·(2 - α)), Δ, z - qmin and Q, made once and not for every value."""
    a = alpha.to(wide(at.view.values).dtype)
    made = (torch.log(2.0 / a - 1.0), 1.0 / (1.0 - a), 2.0 / (a * (2.0 - a)), step, zero_point - ends[0])
    return [*(at.param(p).to(a.dtype) for p in made), a.new_full((), ends[1] - ends[0])]


def _forward(
    x: Tensor,
    alpha: Tensor,
    low: Tensor,
    high: Tensor,
    step: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    factor: float = 1.0,
    axis: int | None = None,
    group: int | None = None,
) -> Tensor:
    return quantize_dequantize(x.detach(), step.detach(), zero_point, qmin, qmax, axis, group)


def _backward(
    grad: Tensor,
    x: Tensor,
    alpha: Tensor,
    low: Tensor,
    high: Tensor,
    step: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    factor: float = 1.0,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    if not x.numel():
        return [grad.clone(), *(torch.zeros_like(p) for p in (alpha, low, high))]
    at = Arranged.of(x, axis, group)
    constants = _constants(at, alpha, step, zero_point, (qmin, qmax))
    grad_x, *sums = _gradients(at.view.values, at.like(grad, x), *constants)
    grads = [at.gradient(t, p).mul_(factor) for t, p in zip(sums, (alpha, low, high), strict=True)]
    return [at.view.restore(grad_x), grads[0].mul_(step / 2), *grads[1:]]


soft_quantize = define_operator(
    "soft_quantize",
    "Tensor alpha, Tensor low, Tensor high, Tensor step, Tensor zero_point, int qmin, int qmax, float factor=1.0, "
    + WHERE,
    _forward,
    _backward,
    learned=3,
)
