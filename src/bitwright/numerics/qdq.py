"""Quantize–dequantize, the arithmetic everything else rests on, as ``torch.library`` operators.

    q = clamp(round(x / scale) + zero_point, qmin, qmax)      round half to even, as ONNX QuantizeLinear does
    y = (q - zero_point) * scale

The straight-through gradient is 1 where ``round(x / scale) + zero_point`` lies in [qmin, qmax], else 0; it is
recomputed from x, so nothing but x is kept. Half precision computes in float32. ``axis=None`` is one scale
for the tensor, ``axis`` alone one per channel, ``axis`` with ``group`` one per run of ``group`` values along
the axis.

NaN stays NaN, so it shows, and infinities saturate; neither gets a gradient. No integer stands for NaN.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.kernel_operator import LIBRARY, kernel_operator
from bitwright.numerics.kinds import PerScale, PerValue
from bitwright.numerics.precision import wide
from bitwright.numerics.views import broadcast


@Fused
def nearest_level(x: Tensor, scale: PerScale, zero_point: PerScale, qmin: int, qmax: int) -> Tensor:
    """Round values to the nearest level of the grid."""
    # In place: the eager path is bound by memory.
    q = torch.div(wide(x), scale).round_().add_(zero_point).clamp_(qmin, qmax)
    return q.sub_(zero_point).mul_(scale).to(x.dtype)


@Fused
def straight_through(x: Tensor, grad: PerValue, scale: PerScale, zero_point: PerScale, qmin: int, qmax: int) -> Tensor:
    """Pass the gradient where values round to a level of the grid, else 0."""
    q = torch.div(wide(x), scale).round_().add_(zero_point)
    return torch.where((q >= qmin) & (q <= qmax), grad, 0.0)


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


_WHERE = "int? axis=None, int? group=None"
LIBRARY.define(
    f"quantize(Tensor x, Tensor scale, Tensor zero_point, int qmin, int qmax, {_WHERE}, *, ScalarType dtype) -> Tensor"
)
LIBRARY.define(f"dequantize(Tensor q, Tensor scale, Tensor zero_point, {_WHERE}) -> Tensor")
LIBRARY.impl("quantize", _quantize, "CompositeExplicitAutograd")
LIBRARY.impl("dequantize", _dequantize, "CompositeExplicitAutograd")


@torch.library.register_fake("bitwright::quantize", lib=LIBRARY)
def _(x: Tensor, *args: object, dtype: torch.dtype, **kwargs: object) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@torch.library.register_fake("bitwright::dequantize", lib=LIBRARY)
def _(q: Tensor, scale: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty_like(q, dtype=scale.dtype)


quantize_dequantize = kernel_operator("quantize_dequantize", nearest_level, straight_through)
quantize = torch.ops.bitwright.quantize
dequantize = torch.ops.bitwright.dequantize
