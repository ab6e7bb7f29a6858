"""AdaRoundFakeQuantize, under its old path."""

from bitwright.methods.adaround import AdaRoundFakeQuantize as AdaRoundFakeQuantize
