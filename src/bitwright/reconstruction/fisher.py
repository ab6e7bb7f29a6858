"""Importance: how much each value of a unit's result matters for the predictions, by their gradient."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwright.distributed import Ranks
from bitwright.errors import ConfigError
from bitwright.reconstruction.losses import prediction_gap


class Importance:
    """The diagonal of the Fisher information of results: the mean over all samples of the gradient's square.

    The gradient is that of the gap between the quantized and the float model's predictions. Each tensor's importance
    has the mean 1, so losses keep their size.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, Tensor] = {}

    def add(self, seen: Mapping[Hashable, Tensor], outputs: Sequence[Any], wanted: Sequence[Any]) -> None:
        """Add one batch: results that were ``seen`` on the way to ``outputs``."""
        pairs = [(o, w) for o, w in zip(outputs, wanted, strict=True) if isinstance(o, Tensor) and o.requires_grad]
        if not pairs:
            raise ConfigError("reconstruct: the loss 'fisher' needs a model result with a gradient")
        gap = prediction_gap([output for output, _ in pairs], [target for _, target in pairs])
        known = [key for key, value in seen.items() if value.requires_grad]
        grads = torch.autograd.grad(gap, [seen[key] for key in known], allow_unused=True)
        for key, grad in zip(known, grads, strict=True):
            if grad is not None:
                self._add_square(key, grad)

    def _add_square(self, key: Hashable, grad: Tensor) -> None:
        square = (grad.float() * grad.shape[0]).square().sum(0) if grad.ndim else grad.square()
        before = self._sums.get(key)
        if before is None:
            self._sums[key] = square
        elif before.shape == square.shape:
            self._sums[key] = before + square
        else:
            raise ConfigError(
                f"reconstruct: the loss 'fisher' needs batches of one shape, but {key} has results of "
                f"{tuple(before.shape)} and {tuple(square.shape)}; use loss='mse'"
            )

    def join(self, ranks: Ranks) -> None:
        """Add what all processes have seen."""
        for key in sorted(self._sums, key=str):
            ranks.average([self._sums[key]])  # a common divisor does not matter

    def of(self, key: Hashable) -> Tensor | None:
        """The importance of each value of one sample's result, or None if it has no influence."""
        total = self._sums.get(key)
        mean = 0.0 if total is None else float(total.mean())
        return None if total is None or mean == 0.0 else total / mean
