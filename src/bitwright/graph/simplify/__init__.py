"""Rewrites of the float graph, before QModules are swapped in."""

from bitwright.graph.simplify.functionalize import functionalize

__all__ = ["functionalize"]
