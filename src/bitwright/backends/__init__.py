"""Backends: what targets can do, one file each. A new one is one file with ``register_backend``, or a YAML file."""

from bitwright.backends.base import Backend
from bitwright.backends.files import BACKENDS, find_backend, load_backend, register_backend
from bitwright.backends.rules import ActivationRules, FoldingRules, OperatorRules, TensorRules, WeightRules
from bitwright.registry import import_all

import_all(__name__, __path__)

__all__ = [
    "BACKENDS",
    "ActivationRules",
    "Backend",
    "FoldingRules",
    "OperatorRules",
    "TensorRules",
    "WeightRules",
    "find_backend",
    "load_backend",
    "register_backend",
]
