"""Constraints that targets publish, one file per target. A new one is one function with ``@register_constraint``."""

from bitwright.registry import import_all
from bitwright.verification.constraints.base import (
    CONSTRAINTS,
    Constraint,
    Finding,
    constraints_of,
    register_constraint,
    violations_of,
)
from bitwright.verification.constraints.view import QuantizedTensor, View

import_all(__name__, __path__)

__all__ = [
    "CONSTRAINTS",
    "Constraint",
    "Finding",
    "QuantizedTensor",
    "View",
    "constraints_of",
    "register_constraint",
    "violations_of",
]
