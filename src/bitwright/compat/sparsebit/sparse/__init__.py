"""Sparsebit's pruning."""

from bitwright.compat.refused import refuse

_INSTEAD = "Bitwright quantizes and does not prune; torch.nn.utils.prune makes weights sparse before they are quantized"
__getattr__ = refuse(__name__, dict.fromkeys(("SparseModel", "parse_sconfig"), _INSTEAD))
