"""DoReFaFakeQuantize, under its old path."""

from bitwright.methods.dorefa import DoReFaFakeQuantize as DoReFaFakeQuantize
