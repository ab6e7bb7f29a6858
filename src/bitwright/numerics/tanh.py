"""Weights squeezed by tanh and rounded (DoReFa).

With m = max|tanh(x)| = tanh(max|x|) over the values that share a step, and t = tanh(x) / m in [-1, 1]:

    y = (clamp(round(t / step + z), qmin, qmax) - z) · step

z need not be an integer here. The gradient takes rounding for the identity and goes through the maximum, too, which is
shared by the n values that attain it:

    dx = g·(1 - tanh²(x)) / m  -  [|x| = max|x|]·sign(x)·(1 - m²)·Σ(g·t) / (n·m)

tanh is made from one exponential, which takes a quarter of the time; with u = exp(-2|x|)

    |tanh(x)| = (1 - u) / (1 + u),    1 - tanh²(x) = 4u / (1 + u)²

to within 2e-7 of the exact values. Eager and compiled kernels may differ in the last bit.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.operator import WHERE, Arranged, define_operator, total, wide

_TINY = 1e-30  # a tensor of zeros stays zero


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent, to within 2e-7."""
    u = torch.exp(-2.0 * x.abs())
    t = (1.0 - u) / (1.0 + u)
    return torch.where(x < 0, -t, t)


@Fused
def _largest(x: Tensor) -> Tensor:
    """max|x| over what shares a step."""
    size = wide(x).abs()
    return size.amax() if size.ndim == 1 else size.amax((0, 2))


@Fused
def _values(x: Tensor, rate: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    q = torch.round(tanh(wide(x)) * rate + zero_point).clamp(qmin, qmax)
    return ((q - zero_point) * step).to(x.dtype)


@Fused
def _slope(x: Tensor, grad: Tensor, rate: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g·(1 - tanh²(x)) / m, Σ g·tanh(x), and how many values attain the maximum."""
    values, g = wide(x), wide(grad)
    size = values.abs()
    u = torch.exp(-2.0 * size)
    r = 1.0 / (1.0 + u)
    t = (1.0 - u) * r
    many = total((size == reach).to(values.dtype))
    return (g * (4.0 * u * r * r) * rate).to(grad.dtype), total(torch.where(values < 0, -g, g) * t), many


@Fused
def _share(x: Tensor, slope: Tensor, reach: Tensor, share: Tensor) -> Tensor:
    """Take its part of the maximum's gradient from each value that attains it."""
    values = wide(x)
    part = torch.where(values == reach, share, torch.where(values == -reach, -share, 0.0))
    return (slope - part).to(slope.dtype)


def _reach(at: Arranged) -> tuple[Tensor, Tensor]:
    """max|x| and m, shaped to broadcast."""
    reach = at.view.params(_largest(at.view.values))
    return reach, tanh(reach).clamp(min=_TINY)


def _forward(
    x: Tensor, step: Tensor, zero_point: Tensor, qmin: int, qmax: int, axis: int | None = None, group: int | None = None
) -> Tensor:
    if not x.numel():
        return x.clone()
    at = Arranged.of(x.detach(), axis, group)
    _, m = _reach(at)
    s, z = (at.param(p).to(m.dtype) for p in (step, zero_point))
    return at.view.restore(_values(at.view.values, 1.0 / (m * s), s, z, qmin, qmax))


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
    values = at.view.values
    reach, m = _reach(at)
    slope, pull, many = _slope(values, at.like(grad, x), 1.0 / m, reach)
    share = (1.0 - m * m) * at.view.params(pull / many) / (m * m)
    return [at.view.restore(_share(values, slope, reach, share))]


def squeeze(x: Tensor, axis: int | None = None, group: int | None = None) -> Tensor:
    """tanh(x) / max|tanh(x)|, without a gradient."""
    if not x.numel():
        return x.clone()
    at = Arranged.of(x.detach(), axis, group)
    _, m = _reach(at)
    return at.view.restore((tanh(wide(at.view.values)) / m).to(x.dtype))


tanh_quantize = define_operator(
    "tanh_quantize",
    f"Tensor step, Tensor zero_point, int qmin, int qmax, {WHERE}",
    _forward,
    _backward,
    learned=0,
)
