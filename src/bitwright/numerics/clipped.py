"""Quantization whose step and ends have gradients: what LSQ, LSQ+, PACT, TQT and QDrop are made of.

With v = x / step + zero_point (not rounded), the values are those of ``quantize_dequantize``:

    y = (clamp(round(x / step) + zero_point, qmin, qmax) - zero_point) · step

and the gradients, for a gradient g of y and sums over all values that share a step:

    x     g              where qmin <= v <= qmax, else 0
    step  Σ g·(round(v) - v)   over qmin <= v <= qmax
    low   Σ g                  over v < qmin
    high  Σ g                  over v > qmax

``low`` and ``high`` are the ends (qmin - z)·step and (qmax - z)·step, but only as where gradients go: a method writes
them in terms of what it learns, and autograd does the rest. LSQ writes ``high = (qmax - z) · scale``, PACT
``high = alpha``. The sums of ``step``, ``low`` and ``high`` are multiplied by ``factor``.

Sums of compiled and of eager kernels may differ in the last bit; all else is the same.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.operator import WHERE, Arranged, define_operator, total, wide
from bitwright.numerics.qdq import quantize_dequantize


def gradients_of(
    values: Tensor, g: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, step, low and high, in the precision of ``values``."""
    s, z = step.to(values.dtype), zero_point.to(values.dtype)
    v = torch.div(values, s)
    position = v + z
    below, above = position < qmin, position > qmax
    inside = torch.where(below | above, 0.0, g)
    return (
        inside,
        total(inside * (torch.round(v) - v)),
        total(torch.where(below, g, 0.0)),
        total(torch.where(above, g, 0.0)),
    )


@Fused
def _gradients(
    x: Tensor, grad: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inside, step_sum, below, above = gradients_of(wide(x), wide(grad), step, zero_point, qmin, qmax)
    return inside.to(grad.dtype), step_sum, below, above


def _forward(
    x: Tensor,
    step: Tensor,
    low: Tensor,
    high: Tensor,
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
    step: Tensor,
    low: Tensor,
    high: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    factor: float = 1.0,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    if not x.numel():
        return [grad.clone(), *(torch.zeros_like(p) for p in (step, low, high))]
    at = Arranged.of(x, axis, group)
    grad_x, *sums = _gradients(at.view.values, at.like(grad, x), at.param(step), at.param(zero_point), qmin, qmax)
    ends = (at.gradient(t, p).mul_(factor) for t, p in zip(sums, (step, low, high), strict=True))
    return [at.view.restore(grad_x), *ends]


clipped_quantize = define_operator(
    "clipped_quantize",
    f"Tensor step, Tensor low, Tensor high, Tensor zero_point, int qmin, int qmax, float factor=1.0, {WHERE}",
    _forward,
    _backward,
    learned=3,
)
