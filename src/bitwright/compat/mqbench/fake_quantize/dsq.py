"""DSQFakeQuantize, under its old path."""

from bitwright.methods.dsq import DSQFakeQuantize as DSQFakeQuantize
