"""TqtFakeQuantize, under its old path."""

from bitwright.methods.tqt import TqtFakeQuantize as TqtFakeQuantize
