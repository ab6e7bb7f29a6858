"""LearnableFakeQuantize, under its old path."""

from bitwright.methods.learnable import LearnableFakeQuantize as LearnableFakeQuantize
