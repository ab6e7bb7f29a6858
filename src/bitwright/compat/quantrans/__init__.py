"""QuanTransformer: model transformers, the configs they read, and the QAT layers by the names its users know."""

from bitwright.compat.attributes import ConfigDict
from bitwright.compat.quantrans.builder import QUANTRANSFORMERS, build_mtransformer
from bitwright.compat.quantrans.config import Config
from bitwright.compat.quantrans.quantops import (
    QUANLAYERS,
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
    Qmodes,
    build_quanlayer,
)
from bitwright.compat.quantrans.transformer import Basemtransformer, QuanTransformer, mTransformerV2
from bitwright.compat.quantrans.translate import to_recipe

__all__ = [
    "QUANLAYERS",
    "QUANTRANSFORMERS",
    "ABQATConv2d",
    "APOTQuantConv2d",
    "APOTQuantLinear",
    "Basemtransformer",
    "Config",
    "ConfigDict",
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
    "QuanTransformer",
    "build_mtransformer",
    "build_quanlayer",
    "mTransformerV2",
    "to_recipe",
]
