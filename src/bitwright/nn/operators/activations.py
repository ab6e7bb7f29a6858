"""Activations: functions of each value separately."""

import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.nn.channel_limit import ChannelLimit
from bitwright.nn.operators.base import Limits, Operator, Source, argument, register_operator


def _clamp_limits(node: fx.Node, module: nn.Module | None) -> Limits | None:
    """The limits of a clamp that are numbers; None if a tensor limits it."""
    hardtanh = module is not None or node.target is F.hardtanh
    names, defaults = (("min_val", "max_val"), (-1.0, 1.0)) if hardtanh else (("min", "max"), (None, None))
    low, high = (argument(node, module, i + 1, names[i], defaults[i]) for i in (0, 1))
    return None if isinstance(low, fx.Node) or isinstance(high, fx.Node) else (low, high)


def _relu6_limits(_: fx.Node, module: nn.Module | None) -> Limits | None:
    """0 and 6, unless correction has given each channel a limit of its own."""
    return None if isinstance(module, ChannelLimit) else (0.0, 6.0)


def _define(name: str, *sources: Source, homogeneous: bool = False) -> None:
    register_operator(Operator(name, sources, elementwise=True, homogeneous=homogeneous))


register_operator(
    Operator(
        "relu",
        (nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"),
        elementwise=True,
        homogeneous=True,
        limits=(0.0, None),
    )
)
register_operator(Operator("relu6", (nn.ReLU6, F.relu6, ChannelLimit), elementwise=True, limits=_relu6_limits))
register_operator(
    Operator(
        "clamp",
        (nn.Hardtanh, F.hardtanh, torch.clamp, torch.clip, "clamp", "clip", "clamp_"),
        elementwise=True,
        limits=_clamp_limits,
    )
)
_define("leaky_relu", nn.LeakyReLU, F.leaky_relu, F.leaky_relu_, homogeneous=True)
_define("prelu", nn.PReLU, F.prelu, torch.prelu, homogeneous=True)
_define("elu", nn.ELU, F.elu, F.elu_)
_define("selu", nn.SELU, F.selu, torch.selu)
_define("celu", nn.CELU, F.celu, torch.celu)
_define("silu", nn.SiLU, F.silu)
_define("hardswish", nn.Hardswish, F.hardswish)
_define("hardsigmoid", nn.Hardsigmoid, F.hardsigmoid)
_define("sigmoid", nn.Sigmoid, F.sigmoid, torch.sigmoid, "sigmoid", "sigmoid_")
_define("tanh", nn.Tanh, F.tanh, torch.tanh, "tanh", "tanh_")
_define("gelu", nn.GELU, F.gelu)
_define("mish", nn.Mish, F.mish)
_define("softplus", nn.Softplus, F.softplus)
