"""Fusing by method: functions that make one float layer of a layer and its BatchNorm, and their table."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bitwright.errors import ConfigError

Chain = tuple[type[nn.Module], ...]
Fuse = Callable[..., nn.Module]


def _folded(layer: Any, norm: Any, axis: int) -> Any:
    """A copy of ``layer`` with the running statistics of ``norm`` multiplied in along the axis of its outputs."""
    if norm.running_mean is None or norm.running_var is None:
        raise ConfigError(f"a {type(norm).__name__} without running statistics cannot be fused")
    made = copy.deepcopy(layer)
    with torch.no_grad():
        factor = torch.rsqrt(norm.running_var + norm.eps)
        factor = factor if norm.weight is None else factor * norm.weight
        bias = -norm.running_mean if layer.bias is None else layer.bias - norm.running_mean
        bias = bias * factor if norm.bias is None else bias * factor + norm.bias
        groups = getattr(layer, "groups", 1) if axis else 1
        shape = [1] * layer.weight.ndim
        shape[axis] = -1
        per_group = [part.reshape(shape) for part in factor.chunk(groups)]
        parts = zip(layer.weight.chunk(groups), per_group, strict=True)
        made.weight.copy_(torch.cat([weight * scale for weight, scale in parts]))
        made.bias = nn.Parameter(bias)
    return made


def fuse_linear_bn(linear: nn.Linear, bn: nn.BatchNorm1d) -> nn.Linear:
    """The linear layer that computes ``bn(linear(x))`` with the running statistics."""
    return _folded(linear, bn, 0)


def fuse_conv_bn(conv: nn.Module, bn: nn.Module) -> nn.Module:
    """The convolution that computes ``bn(conv(x))`` with the running statistics."""
    return _folded(conv, bn, 0)


def fuse_conv_bn_relu(conv: nn.Module, bn: nn.Module, relu: nn.Module) -> nn.Sequential:
    """A convolution with the BatchNorm in it, and the ReLU."""
    return nn.Sequential(_folded(conv, bn, 0), relu)


def fuse_deconv_bn(deconv: nn.Module, bn: nn.Module) -> nn.Module:
    """The transposed convolution that computes ``bn(deconv(x))`` with the running statistics."""
    return _folded(deconv, bn, 1)


def fuse_deconv_bn_relu(deconv: nn.Module, bn: nn.Module, relu: nn.Module) -> nn.Sequential:
    """A transposed convolution with the BatchNorm in it, and the ReLU."""
    return nn.Sequential(_folded(deconv, bn, 1), relu)


def _table() -> dict[Chain, Fuse]:
    table: dict[Chain, Fuse] = {(nn.Linear, nn.BatchNorm1d): fuse_linear_bn}
    for d in (1, 2, 3):
        conv, deconv, norm = (getattr(nn, f"{kind}{d}d") for kind in ("Conv", "ConvTranspose", "BatchNorm"))
        table |= {(conv, norm): fuse_conv_bn, (conv, norm, nn.ReLU): fuse_conv_bn_relu}
        table |= {(deconv, norm): fuse_deconv_bn, (deconv, norm, nn.ReLU): fuse_deconv_bn_relu}
    return table


DEFAULT_METHODS: Mapping[Chain, Fuse] = _table()
"""What is fused how where nothing else is said; Bitwright folds these by itself where the backend does."""


class ConvBNReLUFusion:
    """The value of a fusion pattern that says: fuse these modules by the method of their classes.

    Derive from it and write ``fuse(*modules)`` to fuse in another way.
    """

    def __init__(self, methods: Mapping[Chain, Fuse]) -> None:
        self.methods = methods

    def fuse(self, *modules: nn.Module) -> nn.Module:
        """One module that computes what ``modules`` do, one after the other."""
        return self.methods[tuple(type(m) for m in modules)](*modules)
