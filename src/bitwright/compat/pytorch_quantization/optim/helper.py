"""Match, group and freeze parameters; quantize weights in place."""

from bitwright.optim.helper import freeze_parameters, group_parameters, match_parameters, quant_weight_inplace

__all__ = ["freeze_parameters", "group_parameters", "match_parameters", "quant_weight_inplace"]
