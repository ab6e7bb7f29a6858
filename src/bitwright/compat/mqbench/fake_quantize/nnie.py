"""NNIEFakeQuantize, under its old path."""

from bitwright.methods.nnie import NNIEFakeQuantize as NNIEFakeQuantize
