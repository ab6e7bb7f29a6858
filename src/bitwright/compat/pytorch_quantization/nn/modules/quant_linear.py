"""The quantized linear layer, with and without "Quant" in its name."""

from bitwright import nn as _nn
from bitwright.compat.pytorch_quantization.nn.modules._utils import as_before as _as_before

QuantLinear = Linear = _as_before(_nn.QuantLinear, __name__)
