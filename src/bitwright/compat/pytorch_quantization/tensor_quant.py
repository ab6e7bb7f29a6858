"""The functions and descriptors of NVIDIA's ``tensor_quant``, with its values to the last bit.

    scale = bound / amax,   bound = 2 ** (num_bits - 1 + unsigned) - 1
    q = clamp(round(x * scale), lowest, bound),   lowest = 0 if unsigned, -bound if narrow, else -bound - 1
    y = q / scale

The scale multiplies here; in Bitwright, as in ONNX, values are divided by the step amax / bound, which can differ in
the last bit. ``amax`` is broadcast against ``x``; where it is at most 2 ** -24 everything becomes zero and the scale is
1. Half precision computes in float32. The gradient passes where ``|x| <= amax`` and is zero elsewhere.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bitwright.errors import ConfigError
from bitwright.methods.amax import check_not_negative
from bitwright.numerics.fp8 import BY_BITS, to_fp8
from bitwright.numerics.precision import wide
from bitwright.quantizer import QuantDescriptor

ScaledQuantDescriptor = QuantDescriptor

QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8)
QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8, unsigned=True)
QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)

SMALLEST_AMAX = 2.0**-24
LARGEST_HALF = 65504.0


class _Straight(Function):
    """Values computed elsewhere, with the gradient of ``x`` where it is between two ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, low: Tensor, high: Tensor) -> Tensor:
        ctx.save_for_backward(x, low, high)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, high = ctx.saved_tensors
        return torch.where((x >= low) & (x <= high), grads[0], 0.0), None, None, None


def tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the integers (as floats of the input's type) and the scale; ``integers / scale`` goes back."""
    amax = _checked(inputs, amax, unsigned)
    q, scale = _integers(inputs.detach(), amax, num_bits, unsigned, narrow_range)
    if inputs.dtype == torch.half and bool((scale > LARGEST_HALF).any()):
        raise ConfigError(
            f"scale is too large for FP16 with amax={float(amax.min()):.4g}: it is {float(scale.max()):.6g}, the "
            f"largest half is {LARGEST_HALF:.0f}; quantize in float32"
        )
    return _Straight.apply(inputs, q.to(inputs.dtype), -amax, amax), scale.to(inputs.dtype)


def fake_tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> Tensor:
    """Quantize and dequantize."""
    amax = _checked(inputs, amax, unsigned)
    q, scale = _integers(inputs.detach(), amax, num_bits, unsigned, narrow_range)
    return _Straight.apply(inputs, (q / scale.to(q.dtype)).to(inputs.dtype), -amax, amax)


legacy_fake_tensor_quant = fake_tensor_quant


def fake_affine_tensor_quant(
    inputs: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
) -> Tensor:
    """Quantize and dequantize between two ends; the range of a whole tensor."""
    low, high = (_tensor(inputs, end) for end in (min_range, max_range))
    if bool((low >= high).any()):
        raise ConfigError(f"the range ends ({float(high.max()):.4g}) before it begins ({float(low.min()):.4g})")
    step = (high - low) / (2.0**num_bits - 1)
    lowest = -(2.0 ** (num_bits - 1))
    zero = torch.round(low / step) - lowest
    q = torch.clamp(torch.round(wide(inputs.detach()) / step) - zero, lowest, -lowest - 1)
    return _Straight.apply(inputs, ((q + zero) * step).to(inputs.dtype), low, high)


def scaled_e4m3(inputs: Tensor, amax: Tensor | float | None = None, E: int = 4, M: int = 3) -> Tensor:
    """Round to E4M3 and back so that ``amax`` is the largest number; without amax the scale is 1."""
    return _scaled_fp8("scaled_e4m3", inputs, amax, (E, M), (4, 3))


def scaled_e5m2(inputs: Tensor, amax: Tensor | float | None = None, E: int = 5, M: int = 2) -> Tensor:
    """Round to E5M2 and back so that ``amax`` is the largest number; without amax the scale is 1."""
    return _scaled_fp8("scaled_e5m2", inputs, amax, (E, M), (5, 2))


def _scaled_fp8(
    name: str, inputs: Tensor, amax: Tensor | float | None, given: tuple[int, int], allowed: tuple[int, int]
) -> Tensor:
    if given != allowed:
        raise NotImplementedError(f"{name} has E={allowed[0]} and M={allowed[1]}, not E={given[0]} and M={given[1]}")
    kind = BY_BITS[allowed]
    amax = _checked(inputs, kind.top if amax is None else amax, unsigned=False)
    amax = wide(amax)
    dead = amax <= SMALLEST_AMAX
    scale = torch.where(dead, 0.0, amax.reciprocal() * kind.top)
    rounded = to_fp8(wide(inputs.detach()) * scale, kind).to(wide(inputs).dtype)
    values = (rounded / torch.where(dead, 1.0, scale)).masked_fill(inputs.abs() < SMALLEST_AMAX, 0)
    return _Straight.apply(inputs, values.to(inputs.dtype), -amax, amax)


FP8 = {(4, 3): scaled_e4m3, (5, 2): scaled_e5m2}


def _integers(x: Tensor, amax: Tensor, num_bits: int, unsigned: bool, narrow: bool) -> tuple[Tensor, Tensor]:
    """The integers of ``x`` (as floats, not in half precision) and the scale that divides them."""
    bound = 2.0 ** (num_bits - 1 + int(unsigned)) - 1.0
    amax = wide(amax)
    dead = amax <= SMALLEST_AMAX
    # A tensor divides a tensor: a plain number would be multiplied with the reciprocal, which rounds twice.
    scale = torch.full((), bound, dtype=torch.float32, device=amax.device) / amax
    lowest = 0.0 if unsigned else -bound if narrow else -bound - 1.0
    q = (wide(x) * torch.where(dead, 0.0, scale)).round_().clamp_(lowest, bound)
    return q, torch.where(dead, 1.0, scale)


def _tensor(x: Tensor, end: Tensor | float) -> Tensor:
    return end if isinstance(end, Tensor) else torch.tensor(end, dtype=wide(x).dtype, device=x.device)


def _checked(x: Tensor, amax: Tensor | float, unsigned: bool) -> Tensor:
    amax = _tensor(x, amax)
    if not torch.compiler.is_compiling() and bool((amax < 0).any()):
        raise ConfigError(f"Negative values in amax: the lowest is {float(amax.min()):.4g}, it must be 0 or more")
    if unsigned:
        check_not_negative(x)
    return amax
