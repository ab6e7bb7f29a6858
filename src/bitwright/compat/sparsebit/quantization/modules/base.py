"""What a QModule derives from, under its old path."""

from bitwright.nn.opr import QuantOpr as QuantOpr
