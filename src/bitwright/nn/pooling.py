"""Quantized pooling, 1d to 3d, with every argument of the originals."""

from torch import nn

from bitwright.nn.quantized_input import QuantizedInput
from bitwright.nn.registry import register_qmodule


@register_qmodule(sources=[nn.MaxPool1d])
class QuantMaxPool1d(QuantizedInput, nn.MaxPool1d):
    """nn.MaxPool1d with a quantized input."""


@register_qmodule(sources=[nn.MaxPool2d])
class QuantMaxPool2d(QuantizedInput, nn.MaxPool2d):
    """nn.MaxPool2d with a quantized input."""


@register_qmodule(sources=[nn.MaxPool3d])
class QuantMaxPool3d(QuantizedInput, nn.MaxPool3d):
    """nn.MaxPool3d with a quantized input."""


@register_qmodule(sources=[nn.AvgPool1d])
class QuantAvgPool1d(QuantizedInput, nn.AvgPool1d):
    """nn.AvgPool1d with a quantized input."""

    by_default = True


@register_qmodule(sources=[nn.AvgPool2d])
class QuantAvgPool2d(QuantizedInput, nn.AvgPool2d):
    """nn.AvgPool2d with a quantized input."""

    by_default = True


@register_qmodule(sources=[nn.AvgPool3d])
class QuantAvgPool3d(QuantizedInput, nn.AvgPool3d):
    """nn.AvgPool3d with a quantized input."""

    by_default = True


@register_qmodule(sources=[nn.AdaptiveAvgPool1d])
class QuantAdaptiveAvgPool1d(QuantizedInput, nn.AdaptiveAvgPool1d):
    """nn.AdaptiveAvgPool1d with a quantized input."""

    by_default = True


@register_qmodule(sources=[nn.AdaptiveAvgPool2d])
class QuantAdaptiveAvgPool2d(QuantizedInput, nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d with a quantized input."""

    by_default = True


@register_qmodule(sources=[nn.AdaptiveAvgPool3d])
class QuantAdaptiveAvgPool3d(QuantizedInput, nn.AdaptiveAvgPool3d):
    """nn.AdaptiveAvgPool3d with a quantized input."""

    by_default = True
