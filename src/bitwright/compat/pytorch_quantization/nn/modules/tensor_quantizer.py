"""The quantizer of a tensor."""

from bitwright.compat.pytorch_quantization.onnx_export import enable_onnx_export
from bitwright.quantizer import TensorQuantizer

__all__ = ["TensorQuantizer", "enable_onnx_export"]
