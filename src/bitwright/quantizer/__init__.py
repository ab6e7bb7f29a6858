"""TensorQuantizer: the only object in the system that quantizes a tensor, and QuantDescriptor, which builds one."""

from bitwright.quantizer.core import TensorQuantizer, quantizers
from bitwright.quantizer.descriptor import QuantDescriptor
from bitwright.quantizer.float_state import float_state_dict
from bitwright.quantizer.mode import Mode
from bitwright.quantizer.saturation import saturates

__all__ = ["Mode", "QuantDescriptor", "TensorQuantizer", "float_state_dict", "quantizers", "saturates"]
