"""Descent: the steps of Adam that minimize a unit's error over roundings and scales."""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.distributed import Ranks
from bitwright.reconstruction.learned import LearnedScale, LearnedWeight
from bitwright.reconstruction.roundings import roundings_of
from bitwright.reconstruction.settings import Settings


class Descent:
    """Everything that is trained together: weights that learn their rounding, and activations their scale."""

    def __init__(
        self, weights: list[LearnedWeight], scales: list[LearnedScale], steps: int, settings: Settings
    ) -> None:
        self.steps, self.settings, self.scales = steps, settings, scales
        self.roundings = roundings_of(weights)
        stretches = [w.method.stretch for w in weights if w.method.stretch is not None]
        self._others: list[nn.Parameter] = [*stretches, *(scale.scale for scale in scales)]
        self._all = [*(r.rounding for r in self.roundings), *self._others]
        groups: list[dict[str, Any]] = [{"params": [r.rounding], "lr": settings.lr} for r in self.roundings]
        groups += [{"params": [stretch], "lr": settings.weight_scale_lr} for stretch in stretches]
        groups += [{"params": [s.scale], "lr": settings.scale_lr * _size(s.scale)} for s in scales]
        self._adam = torch.optim.Adam(groups, fused=_fusible(self._all))
        self._rates = [(group, group["lr"]) for group in self._adam.param_groups[len(self.roundings) :]]
        self._strength = settings.rounding_weight / max(sum(r.rounding.numel() for r in self.roundings), 1)

    def take(self, step: int, loss: Callable[[], Tensor], ranks: Ranks) -> None:
        """Take one step; ``loss`` computes with the soft weights. Rates of scales fall to 0 by a cosine."""
        soft = [each.soften() for each in self.roundings]
        wanted = [*chain(*soft), *self._others]
        grads = iter(torch.autograd.grad(loss(), wanted, allow_unused=True, materialize_grads=True))
        beta, pressure = self.settings.beta_at(step, self.steps), self.settings.pressure(step, self.steps)
        for made, each in zip(soft, self.roundings, strict=True):
            each.pull([next(grads) for _ in made], beta, self._strength * pressure)
        for parameter, grad in zip(self._others, grads, strict=True):
            parameter.grad = grad
        ranks.average([parameter.grad for parameter in self._all])
        for group, rate in self._rates:
            group["lr"] = rate * 0.5 * (1.0 + math.cos(math.pi * step / self.steps))
        self._adam.step()

    def decided(self) -> bool:
        """Whether nothing is left to learn: every rounding is up or down, and no scale learns."""
        return not self.scales and all(each.decided() for each in self.roundings)

    def finish(self) -> None:
        """Store what was learned in the weights."""
        for each in self.roundings:
            each.finish()


def _size(scale: Tensor) -> float:
    return float(scale.detach().abs().mean())


def _fusible(parameters: list[nn.Parameter]) -> bool | None:
    """Whether torch has one kernel for a step of Adam on all these."""
    return all(p.device.type in ("cpu", "cuda") and p.dtype is torch.float32 for p in parameters) or None
