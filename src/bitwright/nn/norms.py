"""Norms with a quantized input, with every argument of the originals; they compute in float."""

from torch import nn

from bitwright.nn.quantized_input import QuantizedInput
from bitwright.nn.registry import register_qmodule


@register_qmodule(sources=[nn.BatchNorm1d])
class QuantBatchNorm1d(QuantizedInput, nn.BatchNorm1d):
    """nn.BatchNorm1d with a quantized input."""


@register_qmodule(sources=[nn.BatchNorm2d])
class QuantBatchNorm2d(QuantizedInput, nn.BatchNorm2d):
    """nn.BatchNorm2d with a quantized input."""


@register_qmodule(sources=[nn.BatchNorm3d])
class QuantBatchNorm3d(QuantizedInput, nn.BatchNorm3d):
    """nn.BatchNorm3d with a quantized input."""


@register_qmodule(sources=[nn.InstanceNorm1d])
class QuantInstanceNorm1d(QuantizedInput, nn.InstanceNorm1d):
    """nn.InstanceNorm1d with a quantized input."""


@register_qmodule(sources=[nn.InstanceNorm2d])
class QuantInstanceNorm2d(QuantizedInput, nn.InstanceNorm2d):
    """nn.InstanceNorm2d with a quantized input."""


@register_qmodule(sources=[nn.InstanceNorm3d])
class QuantInstanceNorm3d(QuantizedInput, nn.InstanceNorm3d):
    """nn.InstanceNorm3d with a quantized input."""


@register_qmodule(sources=[nn.LayerNorm])
class QuantLayerNorm(QuantizedInput, nn.LayerNorm):
    """nn.LayerNorm with a quantized input."""


@register_qmodule(sources=[nn.GroupNorm])
class QuantGroupNorm(QuantizedInput, nn.GroupNorm):
    """nn.GroupNorm with a quantized input."""
