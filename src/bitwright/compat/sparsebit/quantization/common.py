"""Enums and their names in configs."""

from enum import Enum

import torch

from bitwright.compat.sparsebit.defaults import SCHEMES
from bitwright.compat.sparsebit.own_classes import Granularity as Granularity
from bitwright.errors import suggest


class QuantTarget(Enum):
    """What is quantized."""

    WEIGHT = 0
    FEATURE = 1


class Backend(Enum):
    """The targets that Sparsebit has."""

    VIRTUAL = 0
    ONNXRUNTIME = 1
    TENSORRT = 2


def get_backend(backend: object) -> Backend:
    """The target of a name."""
    known = {member.name.lower(): member for member in Backend}
    if backend not in known:
        raise TypeError(f"unknown backend {backend!r}{suggest(str(backend), known)}")
    return known[backend]


def get_qscheme(qscheme: object) -> torch.qscheme:
    """Torch's scheme for a name such as ``per-channel-symmetric``."""
    if qscheme not in SCHEMES:
        raise TypeError(f"unknown scheme {qscheme!r}{suggest(str(qscheme), SCHEMES)}")
    return getattr(torch, qscheme.replace("-", "_"))
