"""QAT layers: the registry, its builder, and every layer made from a kind of quantizing and an operator."""

from bitwright.compat.quantrans.quantops.builder import QUANLAYERS, build_quanlayer
from bitwright.compat.quantrans.quantops.layers import (
    ABQATConv2d,
    APOTQuantConv2d,
    APOTQuantLinear,
    DRFConv,
    DRFLinear,
    DSQConv,
    DSQConvV2,
    DSQLinear,
    EightBitQuantConv,
    EightBitQuantLinear,
    LSQConv2d,
    LSQDPlusConv2d,
    LSQLinear,
    LSQPlusConv2d,
    LSQPlusLinear,
)
from bitwright.compat.quantrans.quantops.options import Qmodes

__all__ = [
    "QUANLAYERS",
    "ABQATConv2d",
    "APOTQuantConv2d",
    "APOTQuantLinear",
    "DRFConv",
    "DRFLinear",
    "DSQConv",
    "DSQConvV2",
    "DSQLinear",
    "EightBitQuantConv",
    "EightBitQuantLinear",
    "LSQConv2d",
    "LSQDPlusConv2d",
    "LSQLinear",
    "LSQPlusConv2d",
    "LSQPlusLinear",
    "Qmodes",
    "build_quanlayer",
]
