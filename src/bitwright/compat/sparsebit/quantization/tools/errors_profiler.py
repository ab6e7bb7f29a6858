"""How far the result of each quantized layer is from the float one."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.compat.node_by_node import layer_errors
from bitwright.graph import CapturedModel, Inputs


class QuantizationErrorProfiler:
    """Runs a prepared and calibrated model, or that of a QuantModel, node by node in float and quantized."""

    def __init__(self, model: nn.Module) -> None:
        inside = getattr(model, "model", None)
        self.model = inside if isinstance(inside, CapturedModel) else model

    def apply(
        self, data: object, checker: Callable[[Tensor, Tensor], Any] = F.mse_loss, is_async: bool = True
    ) -> dict[str, Any]:
        """The result of ``checker`` for each layer, quantized alone or with all before it."""
        return layer_errors(self.model, Inputs.of(data), checker, is_async)
