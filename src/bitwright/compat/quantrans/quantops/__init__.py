"""QAT layers: the registry, its builder, and every layer made from a kind of quantizing and an operator."""

from bitwright.compat.quantrans.quantops.builder import QUANLAYERS, build_quanlayer
from bitwright.compat.quantrans.quantops.layers import *
from bitwright.compat.quantrans.quantops.options import Qmodes
