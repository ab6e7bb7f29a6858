"""Mixed precision: bits of single layers."""

from bitwright.compat.refused import refuse

_INSTEAD = "bw.sensitivity says what bits cost each layer, bw.search_bits chooses bits under a budget"
_NAMES = ("mixprecision_profiling", "ILP_bit_selection", "mp_model_size", "hessian_per_layer", "prepare_module")
__getattr__ = refuse(__name__, dict.fromkeys(_NAMES, _INSTEAD))
