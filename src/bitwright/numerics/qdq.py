"""Quantize–dequantize, the one arithmetic everything rests on, as ``torch.library`` operators.

    q = clamp(round(x / scale) + zero_point, qmin, qmax)      round half to even, as ONNX QuantizeLinear does
    y = (q - zero_point) * scale

The straight-through gradient is 1 where ``round(x / scale) + zero_point`` lies in [qmin, qmax], else 0; it is
recomputed from x, so nothing but x is kept. Half precision computes in float32. ``axis=None`` is one scale
for the tensor, ``axis`` alone one per channel, ``axis`` with ``group`` one per run of ``group`` values along
the axis.

NaN stays NaN, so that it is seen, and infinities saturate; neither gets a gradient. NaN has no integer.
"""

from typing import Any

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.operator import LIBRARY, WHERE, Arranged, define_operator, wide
from bitwright.numerics.views import broadcast

_PARAMS = f"Tensor scale, Tensor zero_point, int qmin, int qmax, {WHERE}"


@Fused
def _forward_kernel(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    values = wide(x)
    s, z = scale.to(values.dtype), zero_point.to(values.dtype)
    q = torch.div(values, s).round_().add_(z).clamp_(qmin, qmax)  # in place: the eager path is bound by memory
    return q.sub_(z).mul_(s).to(x.dtype)


@Fused
def _backward_kernel(x: Tensor, grad: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    values = wide(x)
    s, z = scale.to(values.dtype), zero_point.to(values.dtype)
    q = torch.div(values, s).round_().add_(z)
    return grad * ((q >= qmin) & (q <= qmax))


def _forward(
    x: Tensor,
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
    params = at.param(scale.detach()), at.param(zero_point)
    return at.view.restore(_forward_kernel(at.view.values, *params, qmin, qmax))


def _backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    if not x.numel():
        return [grad.clone()]
    at = Arranged.of(x, axis, group)
    params = at.param(scale), at.param(zero_point)
    return [at.view.restore(_backward_kernel(at.view.values, at.like(grad, x), *params, qmin, qmax))]


def _quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    values = wide(x)
    s, z = (broadcast(p, x, axis, group).to(values.dtype) for p in (scale, zero_point))
    return torch.clamp(torch.round(values / s) + z, qmin, qmax).to(torch.int32).to(dtype)


def _dequantize(
    q: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None = None, group: int | None = None
) -> Tensor:
    s, z = (broadcast(p, q, axis, group) for p in (scale, zero_point))
    if q.is_floating_point():  # fp8, which has no zero point
        return q.to(scale.dtype) * s
    # Subtract in integers: an int32 bias does not fit the 24 bits of a float32 mantissa twice.
    return (q.to(torch.int64) - z.to(torch.int64)).to(scale.dtype) * s


LIBRARY.define(f"quantize(Tensor x, {_PARAMS}, *, ScalarType dtype) -> Tensor")
LIBRARY.define(f"dequantize(Tensor q, Tensor scale, Tensor zero_point, {WHERE}) -> Tensor")
LIBRARY.impl("quantize", _quantize, "CompositeExplicitAutograd")
LIBRARY.impl("dequantize", _dequantize, "CompositeExplicitAutograd")


@torch.library.register_fake("bitwright::quantize", lib=LIBRARY)
def _(x: Tensor, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@torch.library.register_fake("bitwright::dequantize", lib=LIBRARY)
def _(q: Tensor, scale: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(q, dtype=scale.dtype)


quantize_dequantize = define_operator("quantize_dequantize", _PARAMS, _forward, _backward, learned=0)
quantize = torch.ops.bitwright.quantize
dequantize = torch.ops.bitwright.dequantize
