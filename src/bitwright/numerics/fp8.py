"""8-bit floating-point numbers: E4M3 (up to 448) and E5M2 (up to 57344).

    y = fp8(clamp(x / scale, -top, top)) * scale

Values beyond the range saturate. The gradient passes where ``|x|`` is at most ``top * scale``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.kernel_operator import kernel_operator
from bitwright.numerics.kinds import PerScale, PerValue
from bitwright.numerics.precision import wide


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
    """Round to the nearest numbers of the format, ties to even; values beyond it saturate, and NaN stays NaN."""
    return wide(x).clamp(-kind.top, kind.top).to(kind.dtype)


@Fused
def _by_scale(x: Tensor, scale: PerScale, form: str) -> Tensor:
    return (to_fp8(wide(x) / scale, BY_NAME[form]).to(scale.dtype) * scale).to(x.dtype)


@Fused
def _by_scale_gradient(x: Tensor, grad: PerValue, scale: PerScale, form: str) -> Tensor:
    return grad.masked_fill(~(x.abs() <= scale * BY_NAME[form].top), 0)


fp8_quantize_dequantize = kernel_operator("fp8_quantize_dequantize", _by_scale, _by_scale_gradient)
