"""The graph: capture of a model, and the schedules that rewrite it."""

from bitwright.graph.capture.attributes import check_attributes
from bitwright.graph.capture.explain import Explanation, explain_capture
from bitwright.graph.capture.guards import is_guard
from bitwright.graph.capture.leaves import Leaf
from bitwright.graph.capture.run import Capture, capture_model
from bitwright.graph.differences import runner
from bitwright.graph.inputs import Inputs
from bitwright.graph.match import InputMatchingType, InputMatchType, Match, Matcher, MatcherNode, MatchingNode, Pattern
from bitwright.graph.model import CapturedModel
from bitwright.graph.passes import fuse, simplify
from bitwright.graph.rewriting.replace import ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.rewrite import PassResult
from bitwright.graph.rewriting.schedule import SCHEDULES, register_schedule
from bitwright.graph.rewriting.stage import read_switches, run_stage

__all__ = [
    "SCHEDULES",
    "Capture",
    "CapturedModel",
    "Explanation",
    "InputMatchType",
    "InputMatchingType",
    "Inputs",
    "Leaf",
    "Match",
    "Matcher",
    "MatcherNode",
    "MatchingNode",
    "PassResult",
    "Pattern",
    "ReplacePatternBase",
    "ReplaceStrategy",
    "capture_model",
    "check_attributes",
    "explain_capture",
    "fuse",
    "is_guard",
    "read_switches",
    "register_schedule",
    "run_stage",
    "runner",
    "simplify",
]
