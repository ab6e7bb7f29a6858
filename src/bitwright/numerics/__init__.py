"""The arithmetic of quantization: operators and their gradients, scales from ranges, and the tools that kernels use."""

from bitwright.numerics.fused import Fused
from bitwright.numerics.kernel_operator import apply_kernel, kernel_operator
from bitwright.numerics.kinds import PerScale, PerValue
from bitwright.numerics.precision import total, wide
from bitwright.numerics.qdq import dequantize, quantize, quantize_dequantize
from bitwright.numerics.ranges import scale_and_zero_point

__all__ = [
    "Fused",
    "PerScale",
    "PerValue",
    "apply_kernel",
    "dequantize",
    "kernel_operator",
    "quantize",
    "quantize_dequantize",
    "scale_and_zero_point",
    "total",
    "wide",
]
