"""Verification: run the exported file in its runtimes and compare it with the simulation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bitwright.verification.limits import DEFAULT, Limits
from bitwright.verification.proof import (
    Diagnosis,
    Latency,
    Memory,
    OperatorCheck,
    OutputCheck,
    Proof,
    RuntimeProof,
    TensorCheck,
    Violation,
)
from bitwright.verification.runtimes import RUNTIMES, Executed, Runtime, register_runtime

if TYPE_CHECKING:
    from bitwright.verification.constraints import CONSTRAINTS, Finding, View, register_constraint
    from bitwright.verification.pipeline import run_file, verify

_LATER = {
    **dict.fromkeys(("run_file", "verify"), "bitwright.verification.pipeline"),
    **dict.fromkeys(("CONSTRAINTS", "Finding", "View", "register_constraint"), "bitwright.verification.constraints"),
}

__all__ = [
    "CONSTRAINTS",
    "DEFAULT",
    "RUNTIMES",
    "Diagnosis",
    "Executed",
    "Finding",
    "Latency",
    "Limits",
    "Memory",
    "OperatorCheck",
    "OutputCheck",
    "Proof",
    "Runtime",
    "RuntimeProof",
    "TensorCheck",
    "View",
    "Violation",
    "register_constraint",
    "register_runtime",
    "run_file",
    "verify",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Load what needs torch on first use, because a child process that only executes files does without it."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
