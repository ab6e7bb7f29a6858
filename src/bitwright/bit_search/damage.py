"""Damage: how far a model's results move from the float model's when some of its quantizers are on."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.calibration import as_batches, as_inputs
from bitwright.checkpoints import digest_of
from bitwright.distributed import TIMEOUT, Ranks
from bitwright.errors import CalibrationError, ConfigError, suggest
from bitwright.modes import eval_mode
from bitwright.observer_state import identity_of
from bitwright.preparation import ledger_of
from bitwright.quantizer import Mode, TensorQuantizer, quantizers
from bitwright.reconstruction.losses import prediction_gap
from bitwright.reconstruction.switch import switched_off
from bitwright.reconstruction.whole import tensors_in

MetricName = Literal["kl", "mse", "sqnr"]
Metric = MetricName | Callable[[nn.Module], float]


class Damage:
    """Measures a model against itself in float.

    Args:
        metric: ``"kl"``: of the softmax of logits, squared error for other results; ``"mse"``: relative to the results'
            power; ``"sqnr"``: minus the ratio of signal and noise in dB; or a function of the model that returns a
            score, such as the accuracy; the damage is how much it falls.
        ranks: all processes, each with its share of the data; by default only one. Batches count in rank order, as if
            one process had them all; scores are averaged.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], metric: Metric, ranks: Ranks | None = None) -> None:
        _check(metric)
        self.model, self.metric, self.ranks = model, metric, ranks or Ranks(None, TIMEOUT)
        self.active = [q for q in quantizers(model).values() if q.quantizes]
        if not self.active:
            raise CalibrationError("no quantizer of the model is quantizing: calibrate it first")
        count = len(ledger_of(model).example.args)
        self.exact: list[list[Tensor]] = []
        self.score = 0.0
        with self.ranks.together(CalibrationError):
            self.inputs = [as_inputs(batch, count) for batch in as_batches(batches)]
            if not self.inputs:
                raise CalibrationError("the data to measure with is empty: it yielded no batch")
            if not callable(metric):
                with self.only([]):
                    self.exact = [self._results(i) for i in range(len(self.inputs))]
        if callable(metric):
            self.score = self._scored(metric, [])

    def identity(self) -> dict[str, str]:
        """Digests of what the damages depend on; raises unless all ranks have the same model."""
        model = identity_of(self.model)
        state = {name: dict(q.state_dict()) for name, q in quantizers(self.model).items()}
        model |= {"calibration": digest_of(state)}
        for what, digest in model.items():
            self.ranks.agree(f"the {what}", digest)
        mine = digest_of([(inputs.args, inputs.kwargs) for inputs in self.inputs])
        word = self.metric if isinstance(self.metric, str) else getattr(self.metric, "__qualname__", "a function")
        return {**model, "data set": digest_of(self.ranks.gather(mine.encode())), "metric": word}

    @contextmanager
    def only(self, chosen: Iterable[TensorQuantizer]) -> Iterator[None]:
        """Make only these of the active quantizers quantize; no gradients, and the model in evaluation mode."""
        with torch.no_grad(), eval_mode(self.model), switched_off(self.active):
            for quantizer in set(chosen) & set(self.active):
                quantizer.mode = Mode.QUANTIZE
            yield

    def of(self, chosen: Iterable[TensorQuantizer]) -> float:
        """The damage of these quantizers alone."""
        if callable(self.metric):
            return self.score - self._scored(self.metric, chosen)
        with self.ranks.together(CalibrationError), self.only(chosen):
            mine = torch.tensor([self._terms(i) for i in range(len(self.exact))], dtype=torch.float64)
        found = torch.cat([each["terms"] for each in self.ranks.gather_tensors({"terms": mine})]).tolist()
        if self.metric == "sqnr":
            noise, signal = sum(n for _, n, _ in found), sum(s for _, _, s in found)
            return -math.inf if noise == 0.0 else 10.0 * math.log10(noise / max(signal, 1e-300))
        return sum(term for term, _, _ in found) / len(found)

    def _scored(self, metric: Callable[[nn.Module], float], chosen: Iterable[TensorQuantizer]) -> float:
        with self.ranks.together(CalibrationError), self.only(chosen):
            mine = torch.tensor([float(metric(self.model))], dtype=torch.float64)
        scores = [each["score"].item() for each in self.ranks.gather_tensors({"score": mine})]
        return sum(scores) / len(scores)

    def _terms(self, number: int) -> tuple[float, float, float]:
        """A batch's damage, and the power of its noise and of its signal."""
        results, wanted = self._results(number), self.exact[number]
        term = float(prediction_gap(results, wanted)) if self.metric == "kl" else _relative(results, wanted)
        noise = sum(float((r - w).double().square().sum()) for r, w in zip(results, wanted, strict=True))
        return term, noise, sum(float(w.double().square().sum()) for w in wanted)

    def _results(self, number: int) -> list[Tensor]:
        return [t for t in tensors_in(self.inputs[number].run(self.model)) if t.is_floating_point()]


def _check(metric: Metric) -> None:
    if not callable(metric) and metric not in get_args(MetricName):
        known = get_args(MetricName)
        raise ConfigError(
            f"the metric cannot be {metric!r}{suggest(str(metric), known)}; it can also be a function of the model"
        )


def _relative(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    pairs = zip(results, wanted, strict=True)
    return sum(float(F.mse_loss(r, w) / w.square().mean().clamp_min(1e-30)) for r, w in pairs)
