"""What all fake quantizers are: the quantizer of a tensor."""

from bitwright.quantizer import TensorQuantizer

QuantizeBase = TensorQuantizer
