"""Arithmetic of quantization: operators, their gradients, and scales from ranges."""

from bitwright.numerics.qdq import dequantize, quantize, quantize_dequantize
from bitwright.numerics.ranges import scale_and_zero_point

__all__ = ["dequantize", "quantize", "quantize_dequantize", "scale_and_zero_point"]
