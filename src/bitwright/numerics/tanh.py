"""Weights squeezed by tanh and rounded (DoReFa).

With m = max|tanh(x)| = tanh(max|x|) over the values that share a step, and t = tanh(x) / m in [-1, 1]:

    y = (clamp(round(t / step + z), qmin, qmax) - z) · step

z need not be an integer here. The gradient takes rounding for the identity and goes through the maximum, too, which is
shared by the n values that attain it:

    dx = g·(1 - tanh²(x)) / m  -  [|x| = max|x|]·sign(x)·(1 - m²)·Σ(g·t) / (n·m)

Eager and compiled kernels may differ in the last bit of the sum.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.hyperbolic import tanh_and_slope
from bitwright.numerics.operator import WHERE, Arranged, define_operator, total, wide


def _reach(values: Tensor) -> tuple[Tensor, Tensor]:
    """max|x| and m over what shares a step, shaped to broadcast."""
    size = values.abs()
    reach = size.amax() if size.ndim == 1 else size.amax((0, 2)).unsqueeze(1)
    return reach, tanh_and_slope(reach)[0].clamp(min=1e-30)  # a tensor of zeros stays zero


@Fused
def _squeezed(x: Tensor) -> Tensor:
    values = wide(x)
    return (tanh_and_slope(values)[0] / _reach(values)[1]).to(x.dtype)


@Fused
def _values(x: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    values = wide(x)
    s, z = step.to(values.dtype), zero_point.to(values.dtype)
    _, m = _reach(values)
    q = torch.round(tanh_and_slope(values)[0] * (1.0 / (m * s)) + z).clamp(qmin, qmax)
    return ((q - z) * s).to(x.dtype)


@Fused
def _gradients(x: Tensor, grad: Tensor) -> Tensor:
    values, g = wide(x), wide(grad)
    reach, m = _reach(values)
    t, slope = tanh_and_slope(values)
    many = total((values.abs() == reach).to(values.dtype))
    share = (1.0 - m * m) / (m * m) * (total(g * t) / many).reshape(m.shape)
    part = torch.where(values == reach, share, torch.where(values == -reach, -share, 0.0))
    return (g * slope * (1.0 / m) - part).to(grad.dtype)


def _forward(
    x: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int, axis: int | None = None, group: int | None = None
) -> Tensor:
    if not x.numel():
        return x.clone()
    at = Arranged.of(x.detach(), axis, group)
    return at.view.restore(_values(at.view.values, at.param(step), at.param(zero_point), qmin, qmax))


def _backward(
    grad: Tensor,
    x: Tensor,
    step: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    if not x.numel():
        return [grad.clone()]
    at = Arranged.of(x, axis, group)
    return [at.view.restore(_gradients(at.view.values, at.like(grad, x)))]


def squeeze(x: Tensor, axis: int | None = None, group: int | None = None) -> Tensor:
    """tanh(x) / max|tanh(x)|, without a gradient."""
    if not x.numel():
        return x.clone()
    at = Arranged.of(x.detach(), axis, group)
    return at.view.restore(_squeezed(at.view.values))


tanh_quantize = define_operator(
    "tanh_quantize",
    f"Tensor step, Tensor zero_point, int qmin, int qmax, {WHERE}",
    _forward,
    _backward,
    learned=0,
)
