"""What schedules are made of, under its old path."""

from bitwright.graph import InputMatchingType as InputMatchingType
from bitwright.graph import InputMatchType as InputMatchType
from bitwright.graph import MatcherNode as MatcherNode
from bitwright.graph import MatchingNode as MatchingNode
from bitwright.graph import ReplacePatternBase as ReplacePatternBase
from bitwright.graph import ReplaceStrategy as ReplaceStrategy
