"""PACTFakeQuantize, under its old path."""

from bitwright.methods.pact import PACTFakeQuantize as PACTFakeQuantize
