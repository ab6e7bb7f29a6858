"""Verification: run the exported file in its runtimes and compare it with the simulation."""

from typing import TYPE_CHECKING, Any

from bitwright.verification.limits import DEFAULT, Limits
from bitwright.verification.proof import Latency, OperatorCheck, OutputCheck, Proof, RuntimeProof, TensorCheck
from bitwright.verification.runtimes import RUNTIMES, Executed, Runtime, register_runtime

if TYPE_CHECKING:
    from bitwright.verification.pipeline import run_file, verify

__all__ = [
    "DEFAULT",
    "RUNTIMES",
    "Executed",
    "Latency",
    "Limits",
    "OperatorCheck",
    "OutputCheck",
    "Proof",
    "Runtime",
    "RuntimeProof",
    "TensorCheck",
    "register_runtime",
    "run_file",
    "verify",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Load what needs torch on first use: a child process that only executes files does without."""
    if name not in ("run_file", "verify"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bitwright.verification import pipeline

    return getattr(pipeline, name)
