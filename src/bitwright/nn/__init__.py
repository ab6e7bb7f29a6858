"""Quantized operators: QModules, the records of what each operator is, and the registry that joins them."""

from bitwright.nn.conv import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
)
from bitwright.nn.functional import QuantFunction
from bitwright.nn.linear import QuantLinear
from bitwright.nn.mixins import PlacedQuantizer, QuantInputMixin, QuantMixin
from bitwright.nn.operators import Operator, define_operator, operator_names
from bitwright.nn.registry import list_qmodules, register_qmodule

__all__ = [
    "Operator",
    "PlacedQuantizer",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantFunction",
    "QuantInputMixin",
    "QuantLinear",
    "QuantMixin",
    "define_operator",
    "list_qmodules",
    "operator_names",
    "register_qmodule",
]
