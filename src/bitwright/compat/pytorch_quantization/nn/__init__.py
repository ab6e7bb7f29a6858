"""Quantized modules; those of the old toolkit also exist without "Quant" in their names."""

from bitwright.compat.pytorch_quantization.nn import functional, modules
from bitwright.compat.pytorch_quantization.nn.modules._utils import QuantInputMixin, QuantMixin
from bitwright.compat.pytorch_quantization.nn.modules.clip import Clip
from bitwright.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer

globals().update({name: value for name, value in vars(modules).items() if isinstance(value, type)})
