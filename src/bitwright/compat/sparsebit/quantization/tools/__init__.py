"""Tools for quantized models."""

from bitwright.compat.sparsebit.quantization.tools.errors_profiler import QuantizationErrorProfiler
