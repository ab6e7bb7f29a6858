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
from bitwright.numerics.views import broadcast, canonical, group_params

_library = torch.library.Library("bitwright", "DEF")
_PARAMS = "Tensor scale, Tensor zero_point, int qmin, int qmax, int? axis=None, int? group=None"
_library.define(f"quantize_dequantize(Tensor x, {_PARAMS}) -> Tensor")
_library.define(f"quantize_dequantize_backward(Tensor grad, Tensor x, {_PARAMS}) -> Tensor")
_library.define(f"quantize(Tensor x, {_PARAMS}, *, ScalarType dtype) -> Tensor")
_library.define("dequantize(Tensor q, Tensor scale, Tensor zero_point, int? axis=None, int? group=None) -> Tensor")

quantize_dequantize = torch.ops.bitwright.quantize_dequantize
quantize = torch.ops.bitwright.quantize
dequantize = torch.ops.bitwright.dequantize


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@Fused
def _forward_kernel(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    wide = _wide(x)
    s, z = scale.to(wide.dtype), zero_point.to(wide.dtype)
    q = torch.div(wide, s).round_().add_(z).clamp_(qmin, qmax)  # in place: the eager path is bound by memory
    return q.sub_(z).mul_(s).to(x.dtype)


@Fused
def _backward_kernel(x: Tensor, grad: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    wide = _wide(x)
    s, z = scale.to(wide.dtype), zero_point.to(wide.dtype)
    q = torch.div(wide, s).round_().add_(z)
    return grad * ((q >= qmin) & (q <= qmax))


def _params(scale: Tensor, zero_point: Tensor, axis: int | None, group: int | None, ndim: int) -> tuple[Tensor, Tensor]:
    if axis is None or group is None:
        return scale, zero_point
    return group_params(scale, axis, ndim), group_params(zero_point, axis, ndim)


def _quantize_dequantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int | None = None,
) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    view = canonical(x.detach(), axis, group)
    s, z = _params(scale, zero_point, axis, group, x.ndim)
    return view.restore(_forward_kernel(view.values, view.params(s.detach()), view.params(z), qmin, qmax))


def _quantize_dequantize_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int | None = None,
) -> Tensor:
    if x.numel() == 0:
        return grad.clone()
    view = canonical(x, axis, group)
    if grad.stride() != x.stride():
        grad = torch.empty_like(x, dtype=grad.dtype).copy_(grad)
    grad_view = canonical(grad, axis, group)
    s, z = _params(scale, zero_point, axis, group, x.ndim)
    return view.restore(_backward_kernel(view.values, grad_view.values, view.params(s), view.params(z), qmin, qmax))


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
    wide = _wide(x)
    s, z = (broadcast(p, x, axis, group).to(wide.dtype) for p in (scale, zero_point))
    return torch.clamp(torch.round(wide / s) + z, qmin, qmax).to(torch.int32).to(dtype)


def _dequantize(
    q: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None = None, group: int | None = None
) -> Tensor:
    s, z = (broadcast(p, q, axis, group) for p in (scale, zero_point))
    # Subtract in integers: an int32 bias does not fit the 24 bits of a float32 mantissa twice.
    return (q.to(torch.int64) - z.to(torch.int64)).to(scale.dtype) * s


for _name, _kernel in {
    "quantize_dequantize": _quantize_dequantize,
    "quantize_dequantize_backward": _quantize_dequantize_backward,
    "quantize": _quantize,
    "dequantize": _dequantize,
}.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("bitwright::quantize_dequantize", lib=_library)
def _(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("bitwright::quantize_dequantize_backward", lib=_library)
def _(grad: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x, dtype=grad.dtype)


@torch.library.register_fake("bitwright::quantize", lib=_library)
def _(x: Tensor, *args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@torch.library.register_fake("bitwright::dequantize", lib=_library)
def _(q: Tensor, scale: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(q, dtype=scale.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    x, scale, zero_point, *rest = inputs
    ctx.save_for_backward(x, scale, zero_point)
    ctx.rest = rest


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
    x, scale, zero_point = ctx.saved_tensors
    grad_x = torch.ops.bitwright.quantize_dequantize_backward(grad, x, scale, zero_point, *ctx.rest)
    return (grad_x, *(None,) * (2 + len(ctx.rest)))


torch.library.register_autograd("bitwright::quantize_dequantize", _backward, setup_context=_setup, lib=_library)
