"""Clip with ends that can be learned."""

from bitwright.quantizer import Clip

__all__ = ["Clip"]
