"""Quantized modules; those that the old toolkit has are there without "Quant" in their names too."""

from bitwright.compat.pytorch_quantization.nn import functional, modules
from bitwright.compat.pytorch_quantization.nn.modules._utils import QuantInputMixin, QuantMixin
from bitwright.compat.pytorch_quantization.nn.modules.clip import Clip
from bitwright.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer

globals().update({name: value for name, value in vars(modules).items() if isinstance(value, type)})
