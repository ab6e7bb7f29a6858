"""Equalizing the weights of neighbouring layers."""

from bitwright.compat.refused import refuse

_INSTEAD = "MQBench used it nowhere; one scale per output channel (per_channel: True) makes it needless"
__getattr__ = refuse(__name__, dict.fromkeys(("convert_weight_equalization", "weight_equalization"), _INSTEAD))
