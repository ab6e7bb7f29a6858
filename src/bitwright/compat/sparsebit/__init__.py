"""Sparsebit's names: ``QuantModel`` and ``parse_qconfig``, on Bitwright's core."""

from bitwright.compat.sparsebit.quantization.quant_config import parse_qconfig
from bitwright.compat.sparsebit.quantization.quant_model import QuantModel
from bitwright.compat.sparsebit.translate import to_recipe
