"""Rewrites of the graph after QModules are swapped in: every file here is one schedule."""

from bitwright.registry import import_all

import_all(__name__, __path__)
