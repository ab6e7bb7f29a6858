"""Functions that modules are made of."""

from bitwright.numerics.amax import clip

__all__ = ["clip"]
