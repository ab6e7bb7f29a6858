"""The graph: capture of a model, and the schedules that rewrite it."""

from bitwright.graph import fuse, simplify
from bitwright.graph.attributes import check_attributes
from bitwright.graph.capture import Capture, capture
from bitwright.graph.explain import Explanation, explain_capture
from bitwright.graph.guards import is_guard
from bitwright.graph.inputs import Inputs
from bitwright.graph.leaves import Leaf
from bitwright.graph.model import CapturedModel
from bitwright.graph.schedule import SCHEDULES, register_schedule, run_stage

__all__ = [
    "SCHEDULES",
    "Capture",
    "CapturedModel",
    "Explanation",
    "Inputs",
    "Leaf",
    "capture",
    "check_attributes",
    "explain_capture",
    "fuse",
    "is_guard",
    "register_schedule",
    "run_stage",
    "simplify",
]
