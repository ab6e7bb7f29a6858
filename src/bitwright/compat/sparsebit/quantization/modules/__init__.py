"""QModules: ``register_qmodule``, the class they derive from, and Bitwright's own by Sparsebit's names."""

from bitwright import nn as _nn
from bitwright.compat.sparsebit.quantization.modules import base
from bitwright.nn.opr import QuantOpr
from bitwright.nn.registry import register_qmodule

# QuantConv2d is QConv2d here, and so on.
globals().update({f"Q{name[5:]}": cls for name, cls in vars(_nn).items() if name.startswith("Quant") and name[5:]})
MatMul, Concat = _nn.QuantMatMul, _nn.QuantCat
