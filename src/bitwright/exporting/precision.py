"""Precision: files compute in float32, so a model in another precision is exported and proven as its float32 twin.

Scales are always float32, and every half-precision weight is also a float32, so the integers are the same. The twin
only leaves out the rounding of half precision between operators.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.graph import CapturedModel, Inputs
from bitwright.graph.facts import dtype_of, facts, set_facts
from bitwright.nn.operators.moves import cast_float
from bitwright.nn.weight_sites import weight_sites

_OTHERS = (torch.float16, torch.bfloat16, torch.float64)
_LARGEST = torch.finfo(torch.float32).max
_CASTS = ("half", "bfloat16", "double")


def precision_of(model: nn.Module) -> torch.dtype:
    """The precision of a model's quantized weights, or of its other parameters, if one of them is not in float32."""
    kinds = [site.weight().dtype for site in weight_sites(model)]
    kinds += [p.dtype for p in model.parameters()]
    return next((kind for kind in kinds if kind in _OTHERS), torch.float32)


def in_float32(model: nn.Module) -> nn.Module:
    """The model itself if it is in float32, or else a float32 copy, including casts in its graphs."""
    if precision_of(model) is torch.float32:
        return model
    twin = copy.deepcopy(model).float()
    for region in [m for m in twin.modules() if isinstance(m, CapturedModel)]:
        for node in region.graph.nodes:
            if node.op == "call_method" and node.target in _CASTS:
                node.target = "float"
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _float32)
            if (tensor := facts(node).tensor) is not None:
                set_facts(node, tensor=tensor._replace(dtype=_float32(tensor.dtype)))
        region.recompile()
    return twin


def inputs_in(inputs: Inputs, kind: torch.dtype = torch.float32) -> Inputs:
    """The same call with float tensors of one precision."""

    def cast(x: object) -> Any:
        return x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x

    given: Any = fx.node.map_aggregate((inputs.args, inputs.kwargs), cast)
    return Inputs(given[0], dict(given[1]))


def drop_idle_casts(model: CapturedModel) -> None:
    """Drop casts to the precision that a tensor has, which would stand between quantizers and operators."""
    for node in [n for n in model.graph.nodes if n.target is cast_float]:
        source: Any = node.args[0]
        if dtype_of(source) == node.args[1]:
            node.replace_all_uses_with(source)
            model.graph.erase_node(node)


def _float32(value: object) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return max(-_LARGEST, min(value, _LARGEST))  # a mask may hold the lowest double, which must stay finite
    return torch.float32 if isinstance(value, torch.dtype) and value in _OTHERS else value
