"""Schedules: patterns of operators and what takes their place."""

from bitwright.compat.sparsebit.quantization.converters import base, fuse_operations, simplifiers
from bitwright.graph import (
    InputMatchingType,
    InputMatchType,
    MatcherNode,
    MatchingNode,
    ReplacePatternBase,
    ReplaceStrategy,
    register_schedule,
)
