"""FixedFakeQuantize, under its old path."""

from bitwright.methods.fixed import FixedFakeQuantize as FixedFakeQuantize
