"""QModules: ``register_qmodule`` and the class they derive from."""

from bitwright.nn.opr import QuantOpr
from bitwright.nn.registry import register_qmodule
