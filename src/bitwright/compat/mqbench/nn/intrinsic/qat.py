"""Layers trained with their BatchNorm: Bitwright folds a BatchNorm into the layer before it by itself."""

from bitwright.compat.mqbench.nn import intrinsic
from bitwright.compat.refused import refuse

_INSTEAD = "write the layer and its BatchNorm as they are: prepare_by_platform folds one into the other"
__getattr__ = refuse(__name__, dict.fromkeys(intrinsic._NAMES, _INSTEAD))
