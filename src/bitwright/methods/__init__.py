"""Methods: how a value is rounded. A new one is one file with ``@register_method``."""

from bitwright.methods.base import METHODS, Method, register_method
from bitwright.methods.fixed import FixedFakeQuantize

__all__ = ["METHODS", "FixedFakeQuantize", "Method", "register_method"]
