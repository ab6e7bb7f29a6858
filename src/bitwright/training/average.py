"""WeightAverage: a moving average of all weights, which is often better than the last ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError


class WeightAverage:
    """Averages the floating-point state of a model over training steps.

    ::

        average = WeightAverage(model, 0.999)
        ...                       # after each optimizer.step(): average.update()
        with average.applied():   # evaluate, export or save the average
            accuracy(model)

    Args:
        model: the model being trained.
        decay: the share of the average kept at each step.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"the decay of an average must be a number from 0 to below 1, not {decay!r}")
        self.model, self.decay, self.steps = model, decay, 0
        self.values = {name: tensor.detach().clone() for name, tensor in self._state()}

    def _state(self) -> list[tuple[str, Tensor]]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return [(name, tensor) for name, tensor in named if tensor.is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights; the first steps count more, so that the average forgets the initial weights."""
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 10.0))
        for name, tensor in self._state():
            known = self.values.get(name)
            if known is None or known.shape != tensor.shape:
                self.values[name] = tensor.detach().clone()
            else:
                known.lerp_(tensor, 1.0 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Replace the model's weights by the average."""
        for name, tensor in self._state():
            tensor.copy_(self.values[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Temporarily replace the model's weights by the average."""
        now = {name: tensor.detach().clone() for name, tensor in self._state()}
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self._state():
                    tensor.copy_(now[name])
