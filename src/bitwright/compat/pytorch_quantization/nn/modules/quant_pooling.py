"""Quantized pooling, with and without "Quant" in its names."""

from bitwright import nn as _nn
from bitwright.compat.pytorch_quantization.nn.modules._utils import as_before as _as_before

QuantAdaptiveAvgPool1d = AdaptiveAvgPool1d = _as_before(_nn.QuantAdaptiveAvgPool1d, __name__)
QuantAdaptiveAvgPool2d = AdaptiveAvgPool2d = _as_before(_nn.QuantAdaptiveAvgPool2d, __name__)
QuantAdaptiveAvgPool3d = AdaptiveAvgPool3d = _as_before(_nn.QuantAdaptiveAvgPool3d, __name__)
QuantAvgPool1d = AvgPool1d = _as_before(_nn.QuantAvgPool1d, __name__)
QuantAvgPool2d = AvgPool2d = _as_before(_nn.QuantAvgPool2d, __name__)
QuantAvgPool3d = AvgPool3d = _as_before(_nn.QuantAvgPool3d, __name__)
QuantMaxPool1d = MaxPool1d = _as_before(_nn.QuantMaxPool1d, __name__)
QuantMaxPool2d = MaxPool2d = _as_before(_nn.QuantMaxPool2d, __name__)
QuantMaxPool3d = MaxPool3d = _as_before(_nn.QuantMaxPool3d, __name__)
