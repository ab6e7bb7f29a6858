"""Symmetric quantization by the largest magnitude ("amax"), with the values of NVIDIA's toolkit to the last bit.

    scale = bound / amax,   bound = 2 ** (num_bits - 1 + unsigned) - 1
    q = clamp(round(x * scale), lowest, bound),   lowest = 0 if unsigned, -bound if narrow, else -bound - 1
    y = q / scale

The scale multiplies here, where :mod:`bitwright.numerics.qdq` divides. ``amax`` is broadcast against ``x``; where it
is at most 2 ** -24 everything becomes zero and the scale is 1. Half precision (fp16 and bf16) computes in float32. The
gradient passes where ``|x| <= amax`` and is zero elsewhere.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bitwright.errors import ConfigError

SMALLEST_AMAX = 2.0**-24
LARGEST_HALF = 65504.0


def bound_of(num_bits: int, unsigned: bool = False) -> float:
    """The highest integer: 127 for 8 bits, 255 if unsigned."""
    return 2.0 ** (num_bits - 1 + int(unsigned)) - 1.0


def limits_of(num_bits: int, unsigned: bool = False, narrow_range: bool = True) -> tuple[float, float]:
    """The lowest and the highest integer."""
    bound = bound_of(num_bits, unsigned)
    return (0.0 if unsigned else -bound if narrow_range else -bound - 1.0), bound


def wide(x: Tensor) -> Tensor:
    """``x`` in the precision that arithmetic happens in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def multiplier(top: float, amax: Tensor) -> tuple[Tensor, Tensor]:
    """``top / amax``, 0 where amax is too small, and where that is."""
    amax = wide(amax)
    dead = amax <= SMALLEST_AMAX
    # A tensor divides a tensor: a plain number would be multiplied with the reciprocal, which rounds twice.
    scale = torch.full((), top, dtype=torch.float32, device=amax.device) / amax
    return torch.where(dead, 0.0, scale), dead


def integers_by_amax(x: Tensor, amax: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The integers of ``x`` (as floats, not in half precision) and the scale that divides them."""
    scale, dead = multiplier(high, amax)
    q = (wide(x) * scale).round_().clamp_(low, high)
    return q, torch.where(dead, 1.0, scale)


class _FakeQuantize(Function):
    """Quantize and dequantize."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, low: float, high: float) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, amax)
        q, scale = integers_by_amax(x, amax, low, high)
        return (q / scale.to(wide(x).dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, amax = ctx.saved_tensors
        return inside(grads[0], x, amax), None, None, None


class _Quantize(Function):
    """Integers and scale, both in the type of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.save_for_backward(x, amax)
        q, scale = integers_by_amax(x, amax, low, high)
        if x.dtype == torch.half and bool((scale > LARGEST_HALF).any()):
            raise ConfigError(
                f"scale is too large for FP16 with amax={float(amax.min()):.4g}: it is {float(scale.max()):.6g}, the "
                f"largest half is {LARGEST_HALF:.0f}; quantize in float32"
            )
        scale = scale.to(x.dtype)
        ctx.mark_non_differentiable(scale)  # who keeps it does not keep the graph
        return q.to(x.dtype), scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, amax = ctx.saved_tensors
        return inside(grads[0], x, amax), None, None, None


class _FakeAffine(Function):
    """Quantize and dequantize between two ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor, num_bits: int) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, low, high)
        step = (high - low) / (2.0**num_bits - 1)
        lowest = -(2.0 ** (num_bits - 1))
        zero = torch.round(low / step) - lowest
        q = torch.clamp(torch.round(wide(x) / step) - zero, lowest, -lowest - 1)
        return ((q + zero) * step).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, low, high = ctx.saved_tensors
        return grads[0].masked_fill((x < low) | (x > high), 0), None, None, None


class _Clip(Function):
    """Clip with gradients for the ends, as in PACT."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, low, high)
        return torch.minimum(torch.maximum(x, low.to(x.dtype)), high.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, low, high = ctx.saved_tensors
        below, above = x < low, x > high
        ends = [
            (grads[0] * outside).sum().reshape(end.shape).to(end.dtype) if needed else None
            for end, outside, needed in zip((low, high), (below, above), ctx.needs_input_grad[1:], strict=True)
        ]
        return grads[0].masked_fill(below | above, 0), *ends


fake_quantize_by_amax = _FakeQuantize.apply
quantize_by_amax = _Quantize.apply


def inside(grad: Tensor, x: Tensor, amax: Tensor) -> Tensor:
    """The gradient where the input was within its range, else zero."""
    return grad.masked_fill(~(x.abs() <= amax), 0)


def check_unsigned(x: Tensor) -> None:
    """Refuse negative values for an unsigned format."""
    if x.numel() and not torch.compiler.is_compiling() and bool((x < 0).any()):
        raise TypeError(
            f"Negative values encountered in unsigned quantization: the lowest is {float(x.min()):.4g}; "
            "use unsigned=False for this tensor"
        )


def check_amax(amax: Tensor) -> None:
    """Refuse a negative amax."""
    if not torch.compiler.is_compiling() and bool((amax < 0).any()):
        raise ConfigError(f"Negative values in amax: the lowest is {float(amax.min()):.4g}, it must be 0 or more")


def tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the integers (as floats of the input's type) and the scale; ``integers / scale`` goes back."""
    amax = _checked(inputs, amax, unsigned)
    return quantize_by_amax(inputs, amax, *limits_of(num_bits, unsigned, narrow_range))


def fake_tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> Tensor:
    """Quantize and dequantize."""
    amax = _checked(inputs, amax, unsigned)
    return fake_quantize_by_amax(inputs, amax, *limits_of(num_bits, unsigned, narrow_range))


legacy_fake_tensor_quant = fake_tensor_quant


def fake_affine_tensor_quant(
    inputs: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
) -> Tensor:
    """Quantize and dequantize between two ends; the range of a whole tensor."""
    low, high = (_ends(inputs, end) for end in (min_range, max_range))
    if bool((low >= high).any()):
        raise ConfigError(f"the range ends ({float(high.max()):.4g}) before it begins ({float(low.min()):.4g})")
    return _FakeAffine.apply(inputs, low, high, num_bits)


def clip(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Clip ``x``; an end gets the sum of the gradients that lie beyond it, and must then be a single number."""
    ends = [_ends(x, end) for end in (low, high)]
    for end in ends:
        if end.requires_grad and end.numel() != 1:
            raise ConfigError(f"an end of clip that is learned must be one number, not of shape {tuple(end.shape)}")
    return _Clip.apply(x, *ends)


def reduce_amax(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = True) -> Tensor:
    """The largest magnitude over ``axis``, without a gradient; over all axes if None, and then it is 0-dimensional."""
    if not x.numel():
        raise ConfigError(f"a tensor of shape {tuple(x.shape)} has no largest value")
    if axis is None:
        return x.detach().abs().amax()
    axes = [axis] if isinstance(axis, int) else list(axis)
    for a in axes:
        if not -x.ndim <= a < x.ndim:
            raise ConfigError(f"axis {a} is out of range for a tensor of shape {tuple(x.shape)}")
    magnitude = x.detach().abs()
    return magnitude.amax(dim=tuple(axes), keepdim=keepdims) if axes else magnitude


def _ends(x: Tensor, end: Tensor | float) -> Tensor:
    return end if isinstance(end, Tensor) else torch.tensor(end, dtype=wide(x).dtype, device=x.device)


def _checked(x: Tensor, amax: Tensor | float, unsigned: bool) -> Tensor:
    amax = _ends(x, amax)
    check_amax(amax)
    if unsigned:
        check_unsigned(x)
    return amax
