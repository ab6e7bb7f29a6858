"""Quantized instance norms, with and without "Quant" in their names."""

from bitwright import nn as _nn
from bitwright.compat.pytorch_quantization.nn.modules._utils import as_before as _as_before

QuantInstanceNorm1d = InstanceNorm1d = _as_before(_nn.QuantInstanceNorm1d, __name__)
QuantInstanceNorm2d = InstanceNorm2d = _as_before(_nn.QuantInstanceNorm2d, __name__)
QuantInstanceNorm3d = InstanceNorm3d = _as_before(_nn.QuantInstanceNorm3d, __name__)
