"""Quantized modules; those that the old toolkit has are there without "Quant" in their names too."""

from bitwright.compat.pytorch_quantization.nn import functional, modules
from bitwright.compat.pytorch_quantization.nn.modules import _utils as _mixins
from bitwright.compat.pytorch_quantization.nn.modules._utils import QuantInputMixin, QuantMixin
from bitwright.compat.pytorch_quantization.nn.modules.clip import Clip
from bitwright.compat.pytorch_quantization.nn.modules.more import *
from bitwright.compat.pytorch_quantization.nn.modules.quant_conv import *
from bitwright.compat.pytorch_quantization.nn.modules.quant_instancenorm import *
from bitwright.compat.pytorch_quantization.nn.modules.quant_linear import *
from bitwright.compat.pytorch_quantization.nn.modules.quant_pooling import *
from bitwright.compat.pytorch_quantization.nn.modules.quant_rnn import *
from bitwright.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
