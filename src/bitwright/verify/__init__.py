"""Verify: run the exported file in its runtimes and compare it with the simulation."""

from bitwright.verify import onnxruntime, openvino
from bitwright.verify.check import Limits, run_file, verify
from bitwright.verify.proof import Latency, OperatorCheck, OutputCheck, Proof, RuntimeProof, TensorCheck
from bitwright.verify.runtime import RUNTIMES, Runtime, register_runtime

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
    "onnxruntime",
    "openvino",
    "register_runtime",
    "run_file",
    "verify",
]
