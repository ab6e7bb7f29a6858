"""The graph: capture of a model, and the schedules that rewrite it."""

from bitwright.graph import fuse, simplify
from bitwright.graph.capture import Capture, Inputs, capture
from bitwright.graph.match import InputMatchingType, InputMatchType, Match, Matcher, MatcherNode, MatchingNode, Pattern
from bitwright.graph.model import CapturedModel
from bitwright.graph.parity import runner
from bitwright.graph.replace import ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewrite import PassResult
from bitwright.graph.schedule import SCHEDULES, register_schedule
from bitwright.graph.stage import read_switches, run_stage

__all__ = [
    "SCHEDULES",
    "Capture",
    "CapturedModel",
    "InputMatchType",
    "InputMatchingType",
    "Inputs",
    "Match",
    "Matcher",
    "MatcherNode",
    "MatchingNode",
    "PassResult",
    "Pattern",
    "ReplacePatternBase",
    "ReplaceStrategy",
    "capture",
    "fuse",
    "read_switches",
    "register_schedule",
    "run_stage",
    "runner",
    "simplify",
]
