"""The operators Bitwright knows, one file per subject. A new one is one file with ``register_operator``."""

from bitwright.nn.operators.base import (
    OPERATORS,
    Limits,
    Operator,
    Source,
    is_kept_whole,
    keep_whole,
    operator_of,
    operator_of_module,
    operator_of_source,
    register_operator,
    unregister_operator,
)
from bitwright.registry import import_all

import_all(__name__, __path__)

__all__ = [
    "OPERATORS",
    "Limits",
    "Operator",
    "Source",
    "is_kept_whole",
    "keep_whole",
    "operator_of",
    "operator_of_module",
    "operator_of_source",
    "register_operator",
    "unregister_operator",
]
