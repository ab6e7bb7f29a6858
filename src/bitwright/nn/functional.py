"""QuantFunction: a function that takes its weight as an argument (F.conv2d, F.linear …), quantized."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from bitwright.nn.layer import QuantLayer
from bitwright.nn.operators import operator_of_source
from bitwright.nn.products import linear_as_written
from bitwright.nn.registry import register_qmodule

_GROUPS = 6  # the position of ``groups`` in every convolution function


@register_qmodule(
    sources=[
        *(F.linear, linear_as_written, F.conv1d, F.conv2d, F.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    ]
)
class QuantFunction(QuantLayer, nn.Module):
    """Calls the function of a node with its own arguments; the second is the weight, the third the bias."""

    def __init__(self, node: fx.Node) -> None:
        nn.Module.__init__(self)
        if not callable(node.target):
            raise TypeError(f"QuantFunction stands for a function call, not for {node.target!r}")
        self.function = node.target
        operator = operator_of_source(node.target)
        self.channel_axis = operator.weight_axis if operator is not None else 0
        groups = node.kwargs.get("groups", node.args[_GROUPS] if len(node.args) > _GROUPS else 1)
        # Groups of a transposed convolution share scales along the weight's second axis, so no int32 bias is possible.
        self.scale_per_output = bool(self.channel_axis == 0 or groups == 1)

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        x = self.input_quantizer(input)
        if self.weight_quantizer.quantizes:
            weight, bias = self.deploy(weight, bias)
        else:
            weight = self.weight_quantizer(weight)
        return self.function(x, weight, bias, *args, **kwargs)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", str(self.function))
