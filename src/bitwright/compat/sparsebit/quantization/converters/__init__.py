"""Schedules: patterns of operators and what takes their place."""

from bitwright.compat.old_paths import add_paths
from bitwright.compat.sparsebit.quantization.converters import fuse_operations, simplifiers
from bitwright.graph import (
    InputMatchingType,
    InputMatchType,
    MatcherNode,
    MatchingNode,
    ReplacePatternBase,
    ReplaceStrategy,
    register_schedule,
)

_DIRECT = "the matcher is Bitwright's: bitwright.graph.match.Matcher finds a pattern in a graph"
add_paths(
    __name__,
    {
        "base": "InputMatchType InputMatchingType MatcherNode MatchingNode ReplacePatternBase ReplaceStrategy",
        "utils": "InputMatchingType MatchingNode ReplacePatternBase ReplaceStrategy",
        "utils.subgraph_matching_node": "InputMatchingType MatchingNode",
        "utils.subgraph_matching_replace_pattern": "ReplacePatternBase ReplaceStrategy",
    },
    refused={
        "prune": {"PruneGraph": "nodes that nothing reads are removed after each rewrite"},
        "utils.subgraph_matching": {"SubgraphMatcher": _DIRECT},
    },
)
