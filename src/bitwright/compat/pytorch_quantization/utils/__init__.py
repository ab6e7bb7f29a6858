"""Helpers, under the old names of their modules."""

from bitwright.compat.pytorch_quantization.utils import quant_logging
from bitwright.compat.pytorch_quantization.utils.reduce_amax import reduce_amax
