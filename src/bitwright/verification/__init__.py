"""Verify: run the exported file in its runtimes and compare it with the simulation."""

from bitwright.verification.check import Limits, run_file, verify
from bitwright.verification.proof import Latency, OperatorCheck, OutputCheck, Proof, RuntimeProof, TensorCheck
from bitwright.verification.runtimes import RUNTIMES, Runtime, register_runtime

__all__ = [
    "RUNTIMES",
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
