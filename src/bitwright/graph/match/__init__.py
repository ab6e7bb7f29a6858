"""The subgraph matcher: patterns of operators, and every place in a graph where they occur."""

from bitwright.graph.match.find import Match, Matcher
from bitwright.graph.match.index import GraphIndex
from bitwright.graph.match.node import InputMatchType, MatcherNode
from bitwright.graph.match.pattern import JointChecker, Pattern

# Names from the later spelling of the same vocabulary.
MatchingNode = MatcherNode
InputMatchingType = InputMatchType

__all__ = [
    "GraphIndex",
    "InputMatchType",
    "InputMatchingType",
    "JointChecker",
    "Match",
    "Matcher",
    "MatcherNode",
    "MatchingNode",
    "Pattern",
]
