"""Methods: how a value is rounded. A new one is one file here with ``@register_method``; nothing else to edit."""

from bitwright.methods.base import METHODS, Method, register_method
from bitwright.methods.groups import parameter_groups
from bitwright.registry import import_all

__all__ = ["METHODS", "Method", "parameter_groups", "register_method"]

import_all(__name__, __path__)
