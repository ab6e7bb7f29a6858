"""Bit search: how much accuracy each layer's bits cost, and the best choice of bits under a budget."""

from bitwright.bit_search.search import BitSearch, search_bits
from bitwright.bit_search.sensitivity import Sensitivity, sensitivity

__all__ = ["BitSearch", "Sensitivity", "search_bits", "sensitivity"]
