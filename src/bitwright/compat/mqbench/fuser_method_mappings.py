"""Fusing by method: functions that merge a layer and its BatchNorm into one float layer, and their table."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bitwright.errors import ConfigError

Chain = tuple[type[nn.Module], ...]
Fuse = Callable[..., nn.Module]


def fuse_conv_bn(layer: Any, norm: Any) -> Any:
    """The layer that computes ``norm(layer(x))`` with the running statistics of ``norm``."""
    if norm.running_mean is None or norm.running_var is None:
        raise ConfigError(f"a {type(norm).__name__} without running statistics cannot be fused")
    transposed = getattr(layer, "transposed", False)  # then outputs are the second axis of the weight
    made = copy.deepcopy(layer)
    with torch.no_grad():
        factor = torch.rsqrt(norm.running_var + norm.eps)
        factor = factor if norm.weight is None else factor * norm.weight
        bias = -norm.running_mean if layer.bias is None else layer.bias - norm.running_mean
        bias = bias * factor if norm.bias is None else bias * factor + norm.bias
        groups = layer.groups if transposed else 1
        shape = [1] * layer.weight.ndim
        shape[int(transposed)] = -1
        per_group = [part.reshape(shape) for part in factor.chunk(groups)]
        parts = zip(layer.weight.chunk(groups), per_group, strict=True)
        made.weight.copy_(torch.cat([weight * scale for weight, scale in parts]))
        made.bias = nn.Parameter(bias)
    return made


def fuse_conv_bn_relu(layer: nn.Module, norm: nn.Module, relu: nn.Module) -> nn.Sequential:
    """The layer with the BatchNorm in it, and the ReLU."""
    return nn.Sequential(fuse_conv_bn(layer, norm), relu)


fuse_linear_bn = fuse_deconv_bn = fuse_conv_bn
fuse_deconv_bn_relu = fuse_conv_bn_relu


def _table() -> dict[Chain, Fuse]:
    table: dict[Chain, Fuse] = {(nn.Linear, nn.BatchNorm1d): fuse_linear_bn}
    for d in (1, 2, 3):
        conv, deconv, norm = (getattr(nn, f"{kind}{d}d") for kind in ("Conv", "ConvTranspose", "BatchNorm"))
        table |= {(layer, norm): fuse_conv_bn for layer in (conv, deconv)}
        table |= {(layer, norm, nn.ReLU): fuse_conv_bn_relu for layer in (conv, deconv)}
    return table


DEFAULT_METHODS: Mapping[Chain, Fuse] = _table()
"""What is fused how where nothing else is said; Bitwright folds these on its own where the backend does."""


class ConvBNReLUFusion:
    """As the value of a fusion pattern: fuse these modules by the method of their classes.

    Derive from it and write ``fuse(*modules)`` to fuse in another way.
    """

    def __init__(self, methods: Mapping[Chain, Fuse]) -> None:
        self.methods = methods

    def fuse(self, *modules: nn.Module) -> nn.Module:
        """One module that computes what ``modules`` do, one after the other."""
        return self.methods[tuple(type(m) for m in modules)](*modules)
