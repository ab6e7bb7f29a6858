"""The graph: capture of a model, and the schedules that rewrite it."""

from bitwright.graph import fuse, simplify
from bitwright.graph.capture import Capture, Inputs, capture
from bitwright.graph.model import CapturedModel
from bitwright.graph.schedule import SCHEDULES, register_schedule, run_stage

__all__ = [
    "SCHEDULES",
    "Capture",
    "CapturedModel",
    "Inputs",
    "capture",
    "fuse",
    "register_schedule",
    "run_stage",
    "simplify",
]
