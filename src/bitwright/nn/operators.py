"""The operators Bitwright knows: one record each, for the modules, functions and methods that compute it.

A record says what an operator is, not what a backend does with it. Whatever has no record stays float.
"""

import operator as py
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.errors import ConfigError
from bitwright.nn.attention_parts import AttentionProduct, add_mask

Source = type[nn.Module] | Callable[..., Any] | str


@dataclass(frozen=True)
class Operator:
    """One operator under all its names.

    Args:
        name: what Bitwright, its rules and its reports call it.
        sources: module classes, functions, and names of tensor methods.
        weight: position or name of the weight among the function's arguments, for operators that have one.
        carries: whether the output holds only values of the input (and zero), so that the input's scale
            serves on. A callable decides by the node and its module (None for functions).
    """

    name: str
    sources: tuple[Source, ...]
    weight: bool = False
    carries: "bool | Callable[[fx.Node, nn.Module | None], bool]" = False

    def carries_scale(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Whether this very call passes its input's values on unchanged."""
        return self.carries(node, module) if callable(self.carries) else self.carries


_BY_SOURCE: dict[Source, Operator] = {}
_BY_NAME: dict[str, Operator] = {}


def define_operator(operator: Operator, *, override: bool = False) -> Operator:
    """Add an operator; a source that is taken is an error unless ``override``."""
    for source in operator.sources:
        taken = _BY_SOURCE.get(source)
        if taken is not None and not override:
            raise ConfigError(
                f"{source!r} already belongs to the operator {taken.name!r}; pass override=True to replace"
            )
    for source in operator.sources:
        _BY_SOURCE[source] = operator
    _BY_NAME[operator.name] = operator
    return operator


def operator_names() -> list[str]:
    """The names of all operators."""
    return sorted(_BY_NAME)


def operator_of_source(source: Source) -> Operator | None:
    """The operator that a module class, a function or a tensor method of that name computes."""
    return _BY_SOURCE.get(source)


def carries(name: str) -> Literal["always", "sometimes", "never"]:
    """Whether an operator only moves values, by what it is alone."""
    found = _BY_NAME[name].carries
    return "sometimes" if callable(found) else "always" if found else "never"


def operator_of_module(module: nn.Module) -> Operator | None:
    """The operator a module computes, by its class or a parent class."""
    if "_input_quantizer" in module._modules:  # it quantizes its input itself: its values are not those that come in
        return None
    for cls in type(module).__mro__:
        if cls in _BY_SOURCE:
            return _BY_SOURCE[cls]
    return None


def operator_of(node: fx.Node, modules: dict[str, nn.Module]) -> Operator | None:
    """The operator a graph node computes, or None."""
    if node.op == "call_module":
        return operator_of_module(modules[str(node.target)])
    if node.op in ("call_function", "call_method"):
        return _BY_SOURCE.get(node.target)
    return None


def _argument(node: fx.Node, module: nn.Module | None, position: int, name: str, default: Any) -> Any:  # noqa: ANN401
    if module is not None:
        return getattr(module, name, default)
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else default)


def _interpolates_nearest(node: fx.Node, module: nn.Module | None) -> bool:
    return _argument(node, module, 3, "mode", "nearest") in ("nearest", "nearest-exact")


_PADS_WITH_OWN_VALUES = tuple(
    getattr(nn, f"{kind}Pad{d}d") for kind in ("Reflection", "Replication", "Circular") for d in (1, 2, 3)
)


def _pads_with_known_values(node: fx.Node, module: nn.Module | None) -> bool:
    if isinstance(module, _PADS_WITH_OWN_VALUES):
        return True
    mode = "constant" if module is not None else _argument(node, module, 2, "mode", "constant")
    # Minus infinity stands before a max-pool, which never chooses it.
    return mode != "constant" or _argument(node, module, 3, "value", None) in (None, 0, 0.0, float("-inf"))


def _returns_values_only(node: fx.Node, module: nn.Module | None) -> bool:
    return not _argument(node, module, 6, "return_indices", False)


def _define(name: str, *sources: Source, **options: Any) -> None:
    define_operator(Operator(name, sources, **options))


for _d in (1, 2, 3):
    _define(f"conv{_d}d", getattr(nn, f"Conv{_d}d"), getattr(F, f"conv{_d}d"), weight=True)
    _define(
        f"conv_transpose{_d}d",
        getattr(nn, f"ConvTranspose{_d}d"),
        getattr(F, f"conv_transpose{_d}d"),
        weight=True,
    )
    _define(
        f"max_pool{_d}d",
        getattr(nn, f"MaxPool{_d}d"),
        getattr(F, f"max_pool{_d}d"),
        getattr(torch, f"max_pool{_d}d"),
        getattr(F, f"max_pool{_d}d_with_indices"),
        carries=_returns_values_only,
    )
    _functions = {
        getattr(F, f"avg_pool{_d}d"),
        getattr(torch, f"avg_pool{_d}d", getattr(F, f"avg_pool{_d}d")),
    }
    _define(f"avg_pool{_d}d", getattr(nn, f"AvgPool{_d}d"), *_functions)
    _functions = {
        getattr(F, f"adaptive_avg_pool{_d}d"),
        getattr(torch, f"adaptive_avg_pool{_d}d", getattr(F, f"adaptive_avg_pool{_d}d")),
    }
    _define(f"adaptive_avg_pool{_d}d", getattr(nn, f"AdaptiveAvgPool{_d}d"), *_functions)
    _functions = {
        getattr(F, f"adaptive_max_pool{_d}d"),
        getattr(torch, f"adaptive_max_pool{_d}d", getattr(F, f"adaptive_max_pool{_d}d")),
    }
    _define(f"adaptive_max_pool{_d}d", getattr(nn, f"AdaptiveMaxPool{_d}d"), *_functions, carries=True)

_define("linear", nn.Linear, F.linear, weight=True)
_define("embedding", nn.Embedding, F.embedding, torch.embedding)
_define("batch_norm", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, F.batch_norm, torch.batch_norm)
_define("instance_norm", nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, F.instance_norm)
_define("layer_norm", nn.LayerNorm, F.layer_norm, torch.layer_norm)
_define("group_norm", nn.GroupNorm, F.group_norm, torch.group_norm)
_define("rms_norm", nn.RMSNorm, F.rms_norm)

_define("relu", nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
_define("relu6", nn.ReLU6, F.relu6)
_define("clamp", nn.Hardtanh, F.hardtanh, torch.clamp, torch.clip, "clamp", "clip", "clamp_")
_define("leaky_relu", nn.LeakyReLU, F.leaky_relu, F.leaky_relu_)
_define("prelu", nn.PReLU, F.prelu, torch.prelu)
_define("elu", nn.ELU, F.elu, F.elu_)
_define("silu", nn.SiLU, F.silu)
_define("hardswish", nn.Hardswish, F.hardswish)
_define("hardsigmoid", nn.Hardsigmoid, F.hardsigmoid)
_define("sigmoid", nn.Sigmoid, F.sigmoid, torch.sigmoid, "sigmoid", "sigmoid_")
_define("tanh", nn.Tanh, F.tanh, torch.tanh, "tanh", "tanh_")
_define("gelu", nn.GELU, F.gelu)
_define("mish", nn.Mish, F.mish)
_define("softplus", nn.Softplus, F.softplus)
_define("softmax", nn.Softmax, F.softmax, torch.softmax, "softmax")
_define("log_softmax", nn.LogSoftmax, F.log_softmax, torch.log_softmax, "log_softmax")

_define("add", py.add, py.iadd, torch.add, "add", "add_", "__add__", "__radd__", "__iadd__")
_define("sub", py.sub, py.isub, torch.sub, torch.subtract, "sub", "sub_")
_define("mul", py.mul, py.imul, torch.mul, torch.multiply, "mul", "mul_")
_define("div", py.truediv, py.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_")
_define("matmul", py.matmul, torch.matmul, torch.bmm, torch.mm, "matmul", "bmm", "mm", "__matmul__")
_define("scaled_dot_product_attention", F.scaled_dot_product_attention, AttentionProduct)
_define("add_mask", add_mask)
_define("cat", torch.cat, torch.concat, torch.concatenate)
_define("stack", torch.stack, carries=False)
_define("mean", torch.mean, "mean")
_define("sum", torch.sum, "sum")

_define("interpolate", nn.Upsample, F.interpolate, F.upsample, carries=_interpolates_nearest)
_define(
    "pad",
    *(getattr(nn, f"{kind}Pad{d}d") for kind in ("Constant", "Zero") for d in (1, 2, 3)),
    *_PADS_WITH_OWN_VALUES,
    F.pad,
    carries=_pads_with_known_values,
)
_define("flatten", nn.Flatten, torch.flatten, torch.ravel, "flatten", "ravel", carries=True)
_define("unflatten", nn.Unflatten, torch.unflatten, "unflatten", carries=True)
_define("reshape", torch.reshape, "reshape", "view", "reshape_as", "view_as", carries=True)
_define("permute", torch.permute, "permute", carries=True)
_define(
    *("transpose", torch.transpose, torch.swapaxes, torch.swapdims, torch.t),
    *("transpose", "swapaxes", "swapdims", "t"),
    carries=True,
)
_define("movedim", torch.movedim, torch.moveaxis, "movedim", carries=True)
_define("squeeze", torch.squeeze, "squeeze", carries=True)
_define("unsqueeze", torch.unsqueeze, "unsqueeze", carries=True)
_define("expand", "expand", "expand_as", torch.broadcast_to, "broadcast_to", carries=True)
_define("repeat", torch.tile, torch.repeat_interleave, "repeat", "tile", "repeat_interleave", carries=True)
_define("split", torch.split, torch.tensor_split, "split", "tensor_split", carries=True)
_define("chunk", torch.chunk, "chunk", carries=True)
_define("unbind", torch.unbind, "unbind", carries=True)
_define("getitem", py.getitem, carries=True)
_define("narrow", torch.narrow, torch.select, torch.index_select, "narrow", "select", "index_select", carries=True)
_define("contiguous", "contiguous", "clone", torch.clone, "detach", carries=True)
_define("pixel_shuffle", nn.PixelShuffle, nn.PixelUnshuffle, F.pixel_shuffle, F.pixel_unshuffle, carries=True)
_define("channel_shuffle", nn.ChannelShuffle, F.channel_shuffle, carries=True)
_define("roll", torch.roll, torch.flip, "roll", "flip", carries=True)
_define(
    "dropout",
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout),
    carries=True,
)
_define("identity", nn.Identity, carries=True)
