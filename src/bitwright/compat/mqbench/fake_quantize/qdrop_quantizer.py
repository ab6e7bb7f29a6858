"""QDropFakeQuantize, under its old path."""

from bitwright.methods.qdrop import QDropFakeQuantize as QDropFakeQuantize
