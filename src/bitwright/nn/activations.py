"""Activations with a quantized input, with every argument of the originals."""

from torch import nn

from bitwright.nn.quantized_input import QuantizedInput
from bitwright.nn.registry import register_qmodule


@register_qmodule(sources=[nn.ReLU])
class QuantReLU(QuantizedInput, nn.ReLU):
    """nn.ReLU with a quantized input."""


@register_qmodule(sources=[nn.ReLU6])
class QuantReLU6(QuantizedInput, nn.ReLU6):
    """nn.ReLU6 with a quantized input."""


@register_qmodule(sources=[nn.LeakyReLU])
class QuantLeakyReLU(QuantizedInput, nn.LeakyReLU):
    """nn.LeakyReLU with a quantized input."""


@register_qmodule(sources=[nn.PReLU])
class QuantPReLU(QuantizedInput, nn.PReLU):
    """nn.PReLU with a quantized input."""


@register_qmodule(sources=[nn.ELU])
class QuantELU(QuantizedInput, nn.ELU):
    """nn.ELU with a quantized input."""


@register_qmodule(sources=[nn.SELU])
class QuantSELU(QuantizedInput, nn.SELU):
    """nn.SELU with a quantized input."""


@register_qmodule(sources=[nn.CELU])
class QuantCELU(QuantizedInput, nn.CELU):
    """nn.CELU with a quantized input."""


@register_qmodule(sources=[nn.SiLU])
class QuantSiLU(QuantizedInput, nn.SiLU):
    """nn.SiLU with a quantized input."""


@register_qmodule(sources=[nn.Mish])
class QuantMish(QuantizedInput, nn.Mish):
    """nn.Mish with a quantized input."""


@register_qmodule(sources=[nn.GELU])
class QuantGELU(QuantizedInput, nn.GELU):
    """nn.GELU with a quantized input."""


@register_qmodule(sources=[nn.Hardswish])
class QuantHardswish(QuantizedInput, nn.Hardswish):
    """nn.Hardswish with a quantized input."""


@register_qmodule(sources=[nn.Hardsigmoid])
class QuantHardsigmoid(QuantizedInput, nn.Hardsigmoid):
    """nn.Hardsigmoid with a quantized input."""


@register_qmodule(sources=[nn.Hardtanh])
class QuantHardtanh(QuantizedInput, nn.Hardtanh):
    """nn.Hardtanh with a quantized input."""


@register_qmodule(sources=[nn.Sigmoid])
class QuantSigmoid(QuantizedInput, nn.Sigmoid):
    """nn.Sigmoid with a quantized input."""


@register_qmodule(sources=[nn.Tanh])
class QuantTanh(QuantizedInput, nn.Tanh):
    """nn.Tanh with a quantized input."""


@register_qmodule(sources=[nn.Softplus])
class QuantSoftplus(QuantizedInput, nn.Softplus):
    """nn.Softplus with a quantized input."""


@register_qmodule(sources=[nn.Softmax])
class QuantSoftmax(QuantizedInput, nn.Softmax):
    """nn.Softmax with a quantized input."""


@register_qmodule(sources=[nn.LogSoftmax])
class QuantLogSoftmax(QuantizedInput, nn.LogSoftmax):
    """nn.LogSoftmax with a quantized input."""
