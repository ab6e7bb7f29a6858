"""Simulation: a model that computes in integers what a runtime's kernels compute, bit for bit."""

from bitwright.simulation import onnxruntime  # noqa: F401  (registers its arithmetic)
from bitwright.simulation.arithmetic import SIMULATED_RUNTIMES, Arithmetic, Operation, register_arithmetic
from bitwright.simulation.grid import Grid, Quantized
from bitwright.simulation.pipeline import Simulated, simulate

__all__ = [
    "SIMULATED_RUNTIMES",
    "Arithmetic",
    "Grid",
    "Operation",
    "Quantized",
    "Simulated",
    "register_arithmetic",
    "simulate",
]
