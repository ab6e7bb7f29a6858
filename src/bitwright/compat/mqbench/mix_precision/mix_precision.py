"""Mixed precision, under its old path."""

from bitwright.compat.mqbench.mix_precision import __getattr__ as __getattr__
