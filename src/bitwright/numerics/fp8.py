"""Numbers of eight bits with an exponent: E4M3 (up to 448) and E5M2 (up to 57344).

By scale, as ONNX does:              y = fp8(clamp(x / scale, -top, top)) * scale
By amax, as pytorch-quantization did:  y = fp8(clamp(x * k, -top, top)) / k,   k = top / amax

Values beyond the range saturate; by amax, values below 2 ** -24 become zero. The gradient passes where ``|x|`` is at
most ``top * scale``, or amax.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bitwright.numerics.amax import SMALLEST_AMAX, check_amax, inside, multiplier, wide
from bitwright.numerics.fused import Fused
from bitwright.numerics.kernel_operator import kernel_operator
from bitwright.numerics.kinds import PerScale, PerValue


@dataclass(frozen=True)
class Fp8:
    """One of the formats: its type in torch and its largest number."""

    dtype: torch.dtype
    top: float


E4M3 = Fp8(torch.float8_e4m3fn, 448.0)
E5M2 = Fp8(torch.float8_e5m2, 57344.0)
BY_BITS = {(4, 3): E4M3, (5, 2): E5M2}
BY_NAME = {"e4m3": E4M3, "e5m2": E5M2}


def to_fp8(x: Tensor, kind: Fp8) -> Tensor:
    """The nearest numbers of the format, ties to even; what is beyond saturates and NaN stays NaN."""
    return wide(x).clamp(-kind.top, kind.top).to(kind.dtype)


@Fused
def _by_scale(x: Tensor, scale: PerScale, form: str) -> Tensor:
    return (to_fp8(wide(x) / scale, BY_NAME[form]).to(scale.dtype) * scale).to(x.dtype)


@Fused
def _by_scale_gradient(x: Tensor, grad: PerValue, scale: PerScale, form: str) -> Tensor:
    return inside(grad, x, scale * BY_NAME[form].top)


fp8_quantize_dequantize = kernel_operator("fp8_quantize_dequantize", _by_scale, _by_scale_gradient)


class _FakeFp8(Function):
    """Round to fp8 and back, in the range of ``amax``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, kind: Fp8) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, amax)
        scale, dead = multiplier(kind.top, amax)
        rounded = to_fp8(wide(x) * scale, kind).to(wide(x).dtype)
        y = rounded / torch.where(dead, 1.0, scale).to(rounded.dtype)
        return y.masked_fill(x.abs() < SMALLEST_AMAX, 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, amax = ctx.saved_tensors
        return inside(grads[0], x, amax), None, None


fake_fp8_by_amax = _FakeFp8.apply


def scaled_fp8(inputs: Tensor, amax: Tensor | float | None, kind: Fp8) -> Tensor:
    """Round to fp8 and back so that ``amax`` is the largest number; without amax the scale is 1."""
    amax = torch.as_tensor(kind.top if amax is None else amax, device=inputs.device)
    check_amax(amax)
    return fake_fp8_by_amax(inputs, amax, kind)


def scaled_e4m3(inputs: Tensor, amax: Tensor | float | None = None, E: int = 4, M: int = 3) -> Tensor:
    """Round to E4M3 and back."""
    return scaled_fp8(inputs, amax, _only("scaled_e4m3", (E, M), (4, 3)))


def scaled_e5m2(inputs: Tensor, amax: Tensor | float | None = None, E: int = 5, M: int = 2) -> Tensor:
    """Round to E5M2 and back."""
    return scaled_fp8(inputs, amax, _only("scaled_e5m2", (E, M), (5, 2)))


def _only(name: str, given: tuple[int, int], allowed: tuple[int, int]) -> Fp8:
    if given != allowed:
        raise NotImplementedError(f"{name} has E={allowed[0]} and M={allowed[1]}, not E={given[0]} and M={given[1]}")
    return BY_BITS[allowed]
