"""QuantLinear: nn.Linear with quantized input and weight."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.nn.layer import QuantLayer
from bitwright.nn.registry import register_qmodule


@register_qmodule(sources=[nn.Linear])
class QuantLinear(QuantLayer, nn.Linear):
    """nn.Linear with quantized input and weight."""

    bias: Any  # a Parameter or None, which nn.Linear does not declare

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)
