"""Helpers for optimizers, under the old name of their module."""

from bitwright.compat.pytorch_quantization.optim import helper
