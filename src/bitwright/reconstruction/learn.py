"""Learn one unit: train roundings and scales until its results come near those of the float model."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.distributed import Ranks
from bitwright.methods.adaround import fraction
from bitwright.numerics.fused import repeated
from bitwright.numerics.noise import drawing_from
from bitwright.quantizer import TensorQuantizer
from bitwright.reconstruction.learned import LearnedScale, LearnedWeight
from bitwright.reconstruction.losses import distance, prediction_gap
from bitwright.reconstruction.samples import Sample, Samples
from bitwright.reconstruction.settings import Settings
from bitwright.reconstruction.switch import switched_off

_LOOK_EVERY = 100  # steps between looks at whether all roundings are decided


@dataclass(frozen=True, eq=False)
class Lesson:
    """All that one unit's learning needs.

    Attributes:
        call: the unit.
        samples: its inputs and targets.
        importance: the weight of each value of each target, if they differ.
        share: by what the error of each result is multiplied; together they are 1 before learning.
        gap: by what the gap between predictions is multiplied.
        weights: what learns its rounding.
        scales: what learns its scale.
        activations: the quantizers of all activations in the unit.
        settings: how to learn.
        ranks: the processes that learn it together, each with samples of its own.
    """

    call: nn.Module
    samples: Samples
    importance: Sequence[Tensor | None]
    share: Sequence[float]
    gap: float
    weights: list[LearnedWeight]
    scales: list[LearnedScale]
    activations: list[TensorQuantizer]
    settings: Settings
    ranks: Ranks

    def learn(self, source: torch.Generator) -> int:
        """Learn as the method says, drawing from ``source`` only, and return the number of steps."""
        with drawing_from(source):
            return self._learn(source)

    def _learn(self, source: torch.Generator) -> int:
        keep = self.settings.keep_at(min((q.spec.bits for q in self.activations), default=8))
        for weight in self.weights:
            weight.begin()
            if self.settings.weight_scale_lr:
                weight.begin_scale()
        if self.settings.method == "qdrop":
            for scale in self.scales:
                scale.begin(keep)
            done = self._train(self.weights, self.scales, self.settings.steps, keep, source)
        else:
            with switched_off(self.activations):
                done = self._train(self.weights, [], self.settings.steps, keep, source)
        for weight in self.weights:
            weight.harden()
        if self.settings.method == "brecq" and self.scales:
            for scale in self.scales:
                scale.begin(keep)
            done += self._train([], self.scales, max(self.settings.steps // 4, 1), keep, source)
        if self.settings.method != "adaround":
            for scale in self.scales:
                scale.finish()
        return done

    def _train(
        self,
        weights: list[LearnedWeight],
        scales: list[LearnedScale],
        steps: int,
        keep: float,
        source: torch.Generator,
    ) -> int:
        settings = self.settings
        optimizer, rates = _optimizer(weights, scales, settings)
        if optimizer is None:
            return 0
        strength = settings.rounding_weight / max(sum(w.rounding.numel() for w in weights), 1)
        for step in range(steps):
            with repeated(steps) if step == 0 else nullcontext():
                loss = self._loss(keep, source)
            optimizer.zero_grad()
            with repeated(steps) if step == 0 else nullcontext():
                loss.backward()
            self.ranks.average([p.grad for group in optimizer.param_groups for p in group["params"]])
            beta = settings.beta_at(step, steps) if weights else None
            if beta is not None:
                for weight in weights:
                    weight.method.add_pull(beta, strength * settings.pressure(step, steps))
            for group, rate in rates:
                group["lr"] = rate * 0.5 * (1.0 + math.cos(math.pi * step / steps))
            optimizer.step()
            if beta is not None and step % _LOOK_EVERY == 0 and not scales and _decided(weights):
                return step + 1
        return steps

    def _loss(self, keep: float, source: torch.Generator) -> Tensor:
        """The error of the unit's results on some samples, and of the predictions if they count."""
        sample = self.samples.draw(max(1, self.settings.batch_size // self.ranks.count), source)
        results = self.call(*_mixed(sample, keep, source))
        terms = distance(results, sample.targets, self.importance)
        loss = sum((t * p for t, p in zip(terms, self.share, strict=True)), start=torch.zeros(()))
        if self.gap and self.samples.rest is not None:
            predicted = self.samples.rest(results if keep == 1.0 else self._quantized(sample, keep), sample.others)
            loss = loss + prediction_gap(predicted, sample.predictions, self.settings.temperature) * self.gap
        return loss

    def _quantized(self, sample: Sample, keep: float) -> list[Any]:
        """The unit's results with all activations quantized, as predictions are made of."""
        for scale in self.scales:
            scale.quantize_by_chance(1.0)
        results = self.call(*sample.quantized)
        for scale in self.scales:
            scale.quantize_by_chance(keep)
        return results


def _optimizer(
    weights: list[LearnedWeight], scales: list[LearnedScale], settings: Settings
) -> tuple[torch.optim.Optimizer | None, list[tuple[dict[str, Any], float]]]:
    """Adam, and the groups of scales, each with a rate that fits its size."""
    groups: list[dict[str, Any]] = []
    if weights:
        groups.append({"params": [w.rounding for w in weights], "lr": settings.lr})
    stretches = [w.method.stretch for w in weights if w.method.stretching]
    if stretches:
        groups.append({"params": stretches, "lr": settings.weight_scale_lr})
    for scale in scales:
        rate = settings.scale_lr * float(scale.scale.detach().abs().mean())
        groups.append({"params": [scale.scale], "lr": rate})
    if not groups:
        return None, []
    optimizer = torch.optim.Adam(groups, fused=_fusible(groups))
    own = optimizer.param_groups[bool(weights) :]
    return optimizer, [(group, group["lr"]) for group in own]


def _fusible(groups: list[dict[str, Any]]) -> bool | None:
    """Whether torch has one kernel for a step of Adam on all these."""
    parameters = [p for group in groups for p in group["params"]]
    return all(p.device.type in ("cpu", "cuda") and p.dtype is torch.float32 for p in parameters) or None


def _mixed(sample: Sample, keep: float, source: torch.Generator) -> list[Any]:
    """The inputs, each value of the quantized model with probability ``keep`` and else of the float one."""
    if keep == 1.0:
        return sample.quantized
    return [
        torch.where(torch.rand(q.shape, generator=source).to(q.device) < keep, q, x)
        if isinstance(q, Tensor) and q is not x and q.is_floating_point()
        else q
        for q, x in zip(sample.quantized, sample.exact, strict=True)
    ]


def _decided(weights: list[LearnedWeight]) -> bool:
    """Whether every rounding is up or down."""
    return all(bool(((h := fraction(w.rounding.detach())).eq(0) | h.eq(1)).all()) for w in weights)
