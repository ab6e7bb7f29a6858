"""Learn one unit: train roundings and scales until its results come close to the float model's."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.distributed import Ranks
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer
from bitwright.numerics import Fused, PerValue, apply_kernel
from bitwright.numerics.fused import repeated
from bitwright.numerics.noise import draw_key, drawing_from, noise
from bitwright.quantizer import TensorQuantizer
from bitwright.reconstruction.descent import Descent
from bitwright.reconstruction.learned import LearnedScale, LearnedWeight
from bitwright.reconstruction.losses import distance, prediction_gap
from bitwright.reconstruction.samples import Sample, Samples
from bitwright.reconstruction.settings import Settings
from bitwright.reconstruction.switch import switched_off

_LOOK_EVERY = 100  # steps between checks whether all roundings are decided


@dataclass(frozen=True, eq=False)
class Lesson:
    """Everything needed to learn one unit.

    Attributes:
        importance: the weight of each value of each target, if they differ.
        share: the factor for the error of each result; the weighted errors add up to 1 before learning.
        gap: the factor for the gap between predictions.
        scales: activations that learn their scale.
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
        """Learn with the given method, drawing only from ``source``, and return the number of steps."""
        with drawing_from(source), ExitStack() as held:
            for layer in {w.layer for w in self.weights}:
                if isinstance(layer, QuantLayer) and not isinstance(layer, QuantFunction):
                    held.enter_context(layer.holding_folds())
            return self._learn(source)

    def _learn(self, source: torch.Generator) -> int:
        keep = self.settings.keep_at(min((q.spec.bits for q in self.activations), default=8))
        for weight in self.weights:
            weight.begin()
            if self.settings.weight_scale_lr:
                weight.begin_scale()
        together = self.scales if self.settings.method == "qdrop" else []
        for scale in together:
            scale.begin(keep)
        with switched_off(self._float(together)):
            done = self._train(self.weights, together, self.settings.steps, keep, source)
        for weight in self.weights:
            weight.harden()
        if self.settings.method == "brecq" and self.scales:
            done += self._learn_scales(keep, source)
        for scale in self.scales:
            scale.finish()
        return done

    def _float(self, learning: list[LearnedScale]) -> list[TensorQuantizer]:
        """The activations that are not quantized while weights learn: fine ones, and all unless QDrop learns."""
        known = {scale.quantizer for scale in learning}
        if self.settings.method == "qdrop":
            known |= {q for q in self.activations if q.spec.bits < 8}
        return [q for q in self.activations if q not in known]

    def _learn_scales(self, keep: float, source: torch.Generator) -> int:
        """Learn the scales alone, with weights that were hardened."""
        for scale in self.scales:
            scale.begin(keep)
        for weight in self.weights:
            weight.hold()
        done = self._train([], self.scales, max(self.settings.steps // 4, 1), keep, source)
        for weight in self.weights:
            weight.let_go()
        return done

    def _train(
        self,
        weights: list[LearnedWeight],
        scales: list[LearnedScale],
        steps: int,
        keep: float,
        source: torch.Generator,
    ) -> int:
        if not weights and not scales:
            return 0
        descent = Descent(weights, scales, steps, self.settings)
        done = steps
        for step in range(steps):
            with repeated(steps) if step == 0 else nullcontext():
                descent.take(step, lambda: self._loss(keep, source), self.ranks)
            if step % _LOOK_EVERY == 0 and descent.decided():
                done = step + 1
                break
        descent.finish()
        return done

    def _loss(self, keep: float, source: torch.Generator) -> Tensor:
        """The error of the unit's results on some samples, and of the predictions if they count."""
        sample = self.samples.draw(max(1, self.settings.batch_size // self.ranks.count), source, exact=keep < 1.0)
        results = self.call(*_mixed(sample, keep))
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


@Fused
def _either(x: Tensor, other: PerValue, key: Tensor, odds: Tensor) -> Tensor:
    return torch.where(noise(x, key) < odds, x, other)


def _mixed(sample: Sample, keep: float) -> list[Any]:
    """The inputs, each value of the quantized model with probability ``keep`` and else of the float one."""
    if keep == 1.0:
        return sample.quantized
    return [
        apply_kernel(_either, q, x, draw_key(q), torch.full((), keep - 0.5, device=q.device), axis=None, group=None)
        if isinstance(q, Tensor) and q is not x and q.is_floating_point()
        else q
        for q, x in zip(sample.quantized, sample.exact, strict=True)
    ]
