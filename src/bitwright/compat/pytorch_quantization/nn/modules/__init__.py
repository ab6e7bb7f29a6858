"""Quantized modules, one file for each kind as the old toolkit had it."""

from bitwright.compat.pytorch_quantization.nn.modules import (
    _utils,
    clip,
    quant_conv,
    quant_instancenorm,
    quant_linear,
    quant_pooling,
    quant_rnn,
    tensor_quantizer,
)

__all__ = [
    "_utils",
    "clip",
    "quant_conv",
    "quant_instancenorm",
    "quant_linear",
    "quant_pooling",
    "quant_rnn",
    "tensor_quantizer",
]
