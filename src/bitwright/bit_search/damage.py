"""Damage: how far a model's results move from the float model's when some of its quantizers are on."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.calibration import as_batches, as_inputs
from bitwright.errors import CalibrationError, ConfigError, suggest
from bitwright.modes import eval_mode
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
        model: a calibrated model.
        batches: data as for ``calibrate``.
        metric: ``"kl"``: of the softmax of logits, squared error for other results; ``"mse"``: relative to the results'
            power; ``"sqnr"``: minus the ratio of signal and noise in dB; or a function of the model that gives a score,
            such as the accuracy: the damage is by how much it falls.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], metric: Metric) -> None:
        if not callable(metric) and metric not in get_args(MetricName):
            known = get_args(MetricName)
            raise ConfigError(
                f"the metric cannot be {metric!r}{suggest(str(metric), known)}, or a function of the model"
            )
        self.model, self.metric = model, metric
        self.active = [q for q in quantizers(model).values() if q.quantizes]
        if not self.active:
            raise CalibrationError("no quantizer of the model is quantizing: calibrate it first")
        count = len(ledger_of(model).example.args)
        self.inputs = [as_inputs(batch, count) for batch in as_batches(batches)]
        if not self.inputs:
            raise CalibrationError("the data to measure with is empty: it gave no batch")
        with self.only([]):
            self.score = metric(model) if callable(metric) else 0.0
            self.exact = [] if callable(metric) else [self._results(i) for i in range(len(self.inputs))]

    @contextmanager
    def only(self, chosen: Iterable[TensorQuantizer]) -> Iterator[None]:
        """Let only these of the quantizers quantize that do so now; no gradients, and the model in evaluation."""
        with torch.no_grad(), eval_mode(self.model), switched_off(self.active):
            for quantizer in set(chosen) & set(self.active):
                quantizer.mode = Mode.QUANTIZE
            yield

    def of(self, chosen: Iterable[TensorQuantizer]) -> float:
        """The damage that these quantizers do alone."""
        with self.only(chosen):
            if callable(self.metric):
                return float(self.score) - float(self.metric(self.model))
            return self._compared(self.metric)

    def _compared(self, metric: MetricName) -> float:
        terms = []
        noise = signal = 0.0
        for number, wanted in enumerate(self.exact):
            results = self._results(number)
            if metric == "kl":
                terms.append(float(prediction_gap(results, wanted)))
            else:
                terms.append(_relative(results, wanted))
            noise += sum(float((r - w).double().square().sum()) for r, w in zip(results, wanted, strict=True))
            signal += sum(float(w.double().square().sum()) for w in wanted)
        if metric == "sqnr":
            return -math.inf if noise == 0.0 else 10.0 * math.log10(noise / max(signal, 1e-300))
        return sum(terms) / len(terms)

    def _results(self, number: int) -> list[Tensor]:
        inputs = self.inputs[number]
        return [t for t in tensors_in(self.model(*inputs.args, **inputs.kwargs)) if t.is_floating_point()]


def _relative(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    pairs = zip(results, wanted, strict=True)
    return sum(float(F.mse_loss(r, w) / w.square().mean().clamp_min(1e-30)) for r, w in pairs)
