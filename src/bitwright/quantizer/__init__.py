"""TensorQuantizer: the only object in the system that quantizes a tensor, and the ways to describe one."""

from bitwright.quantizer.clip import Clip
from bitwright.quantizer.core import TensorQuantizer, quantizers
from bitwright.quantizer.described import DescribedQuantizer
from bitwright.quantizer.descriptor import QuantDescriptor
from bitwright.quantizer.mode import Mode

__all__ = ["Clip", "DescribedQuantizer", "Mode", "QuantDescriptor", "TensorQuantizer", "quantizers"]
