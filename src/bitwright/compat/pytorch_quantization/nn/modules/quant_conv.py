"""Quantized convolutions, with and without "Quant" in their names."""

from bitwright import nn as _nn
from bitwright.compat.pytorch_quantization.nn.modules._utils import as_before as _as_before

QuantConv1d = Conv1d = _as_before(_nn.QuantConv1d, __name__)
QuantConv2d = Conv2d = _as_before(_nn.QuantConv2d, __name__)
QuantConv3d = Conv3d = _as_before(_nn.QuantConv3d, __name__)
QuantConvTranspose1d = ConvTranspose1d = _as_before(_nn.QuantConvTranspose1d, __name__)
QuantConvTranspose2d = ConvTranspose2d = _as_before(_nn.QuantConvTranspose2d, __name__)
QuantConvTranspose3d = ConvTranspose3d = _as_before(_nn.QuantConvTranspose3d, __name__)
