"""Rewrites of the graph after QModules are swapped in."""

from bitwright.graph.fuse.fold_batchnorm import fold_batchnorm

__all__ = ["fold_batchnorm"]
