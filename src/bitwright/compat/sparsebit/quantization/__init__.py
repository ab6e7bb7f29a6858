"""Sparsebit's quantization package: ``QuantModel`` and ``parse_qconfig``, and how users add to it."""

from bitwright.compat.sparsebit.quantization.quant_config import parse_qconfig
from bitwright.compat.sparsebit.quantization.quant_model import QuantModel
