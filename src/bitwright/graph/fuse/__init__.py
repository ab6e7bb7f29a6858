"""Rewrites of the graph after QModules are swapped in: one file each."""

from importlib import import_module
from pkgutil import iter_modules

from bitwright.graph.fuse.fold_batchnorm import fold_batchnorm

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["fold_batchnorm"]
