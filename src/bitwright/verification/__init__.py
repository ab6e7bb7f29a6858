"""Verification: run the exported file in its runtimes and compare it with the simulation."""

from bitwright.verification.limits import DEFAULT, Limits
from bitwright.verification.pipeline import run_file, verify
from bitwright.verification.proof import Latency, OperatorCheck, OutputCheck, Proof, RuntimeProof, TensorCheck
from bitwright.verification.runtimes import RUNTIMES, Executed, Runtime, register_runtime

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
