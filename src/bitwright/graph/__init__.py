"""The graph: capture of a model, and the schedules that rewrite it."""

from bitwright.graph import fuse, simplify
from bitwright.graph.attributes import check_attributes
from bitwright.graph.capture import Capture, capture
from bitwright.graph.differences import runner
from bitwright.graph.explain import Explanation, explain_capture
from bitwright.graph.guards import is_guard
from bitwright.graph.inputs import Inputs
from bitwright.graph.leaves import Leaf
from bitwright.graph.match import InputMatchingType, InputMatchType, Match, Matcher, MatcherNode, MatchingNode, Pattern
from bitwright.graph.model import CapturedModel
from bitwright.graph.replace import ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewrite import PassResult
from bitwright.graph.schedule import SCHEDULES, register_schedule
from bitwright.graph.stage import read_switches, run_stage

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
    "capture",
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
