"""Mixed precision: bits of single layers."""

from bitwright.compat.refused import refuse

_INSTEAD = "give layers bits of their own by rules (docs/how-to/recipes.md); bw.analyze says what they lose"
_NAMES = ("mixprecision_profiling", "ILP_bit_selection", "mp_model_size", "hessian_per_layer", "prepare_module")
__getattr__ = refuse(__name__, dict.fromkeys(_NAMES, _INSTEAD))
