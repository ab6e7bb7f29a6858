"""Schedules: patterns of operators and what takes their place."""

from bitwright.graph import (
    InputMatchingType,
    InputMatchType,
    MatcherNode,
    MatchingNode,
    ReplacePatternBase,
    ReplaceStrategy,
    register_schedule,
)
