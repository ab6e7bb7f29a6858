"""train: a small loop that trains a quantized model."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.calibration import as_inputs
from bitwright.columns import in_columns
from bitwright.correction.channel_maps import norm_place
from bitwright.correction.norms import reestimate_norms
from bitwright.errors import CalibrationError, ConfigError
from bitwright.graph import Inputs
from bitwright.methods import parameter_groups
from bitwright.nn.layer import QuantLayer
from bitwright.nn.norm import freeze_batchnorm, unfreeze_batchnorm
from bitwright.preparation import ledger_of
from bitwright.progress import track
from bitwright.quantizer import quantizers
from bitwright.training.average import WeightAverage
from bitwright.training.bits import change_bits
from bitwright.training.distillation import Distillation
from bitwright.training.oscillation import Oscillations
from bitwright.training.ranges import freeze_ranges

_log = logging.getLogger(__name__)
_FRESH = 50  # batches that determine the statistics of BatchNorms after training


@dataclass(frozen=True)
class EpochResult:
    """One epoch: the mean loss over its steps, their number, and the seconds they took."""

    loss: float
    steps: int
    seconds: float
    score: float | None = None


@dataclass
class Training:
    """What :func:`bitwright.train` did; ``print`` shows it as a table."""

    epochs: list[EpochResult] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [
            (
                str(number),
                f"{e.loss:.4g}",
                str(e.steps),
                f"{e.seconds:.1f}",
                "" if e.score is None else f"{e.score:.4g}",
            )
            for number, e in enumerate(self.epochs, start=1)
        ]
        return "\n".join(in_columns(("epoch", "loss", "steps", "seconds", "score"), rows))

    __repr__ = __str__


def train(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Callable[..., Tensor],
    *,
    epochs: int = 1,
    lr: float = 0.001,
    scale_lr: float | None = None,
    weight_decay: float = 1e-4,
    optimizer: torch.optim.Optimizer | None = None,
    distill: float = 0.0,
    temperature: float = 1.0,
    teacher: nn.Module | None = None,
    batch_statistics: bool = False,
    freeze_norms_after: int | None = None,
    freeze_ranges_after: int | None = None,
    average: float | None = None,
    dampening: float = 0.0,
    freeze_threshold: float | None = None,
    bits: Mapping[int, tuple[int, int]] | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    progress: bool | None = None,
) -> Training:
    """Train a calibrated model with its quantizers on.

    The learning rate falls as a cosine over all epochs. Quantizer parameters have their own rate and no weight decay.

    Args:
        model: a calibrated model whose recipe has methods that learn, see :func:`bitwright.training.qat_recipe`. It is
            trained in place and left in evaluation mode.
        loader: batches of ``(inputs …, target)``, or of inputs in a tuple or dict and the target; read once per epoch.
        loss: ``loss(prediction, target)``, such as ``torch.nn.functional.cross_entropy``.
        epochs: number of epochs.
        lr: learning rate of weights (SGD with momentum 0.9); a trained net with frozen BatchNorms tolerates only a
            small one.
        scale_lr: learning rate of quantizer parameters; a tenth of ``lr`` by default.
        weight_decay: of weights.
        optimizer: your own optimizer instead, over ``qat_parameters(model, …)``; its rates are scaled by the cosine.
        distill: share of the loss, from 0 to 1, for the distance to the float model's predictions.
        temperature: of distillation.
        teacher: a model to learn from instead of the float one.
        batch_statistics: let BatchNorms normalize by the batch and update their statistics. These lag behind moving
            weights, so they are measured again on the first batches after the last epoch, unless they were frozen
            before or the loader cannot be read again.
        freeze_norms_after: the epoch from which their statistics are frozen.
        freeze_ranges_after: the epoch from which scales are frozen.
        average: decay of a moving average of weights, which the model gets in the end.
        dampening: final strength of the pull to the middle of cells; it grows from 0 as a cosine.
        freeze_threshold: freeze weights of up to 4 bits that oscillate more often than this.
        bits: bits of weights and activations by the epoch from which they apply, such as ``{0: (6, 6), 1: (4, 4)}``,
            for those that have fewer than 8 bits now.
        evaluate: a function of the model that returns a score, called after each epoch.
        progress: show a progress bar; by default only on a terminal.
    """
    _check_options(loss, epochs, distill, teacher)
    if epochs > 1 and isinstance(loader, Iterator):
        kind = type(loader).__name__
        raise ConfigError(f"a {kind} can be read only once, not for {epochs} epochs: pass a list or a DataLoader")
    _check_quantizers(model)
    for name, value in (("lr", lr), ("scale_lr", scale_lr), ("weight_decay", weight_decay), ("dampening", dampening)):
        if value is not None and not 0.0 <= value < math.inf:
            raise ConfigError(f"{name} must be a finite number of at least 0, not {value!r}")
    _check_bits(bits, epochs)
    if batch_statistics:
        _check_sizes(model)
    teach = Distillation(model, temperature, teacher) if distill else None
    (unfreeze_batchnorm if batch_statistics else freeze_batchnorm)(model)
    if optimizer is None:
        groups = parameter_groups(
            model, lr=lr, quantizer_lr=lr / 10 if scale_lr is None else scale_lr, weight_decay=weight_decay
        )
        optimizer = torch.optim.SGD(groups, momentum=0.9)
    mean = WeightAverage(model, average) if average is not None else None
    run = _Run(model, loss, optimizer, epochs, teach, distill, mean, dampening, freeze_threshold)
    result = Training()
    for epoch in range(epochs):
        if bits is not None and epoch in bits:
            run.change_bits(*bits[epoch])
        if epoch == freeze_norms_after:
            freeze_batchnorm(model)
        if epoch == freeze_ranges_after:
            freeze_ranges(model)
        begin = time.perf_counter()
        value, steps = run.epoch(epoch, loader, progress)
        if epoch == epochs - 1:
            run.finish(loader, norms=batch_statistics and (freeze_norms_after is None or freeze_norms_after >= epochs))
        score = None if evaluate is None else float(evaluate(model))
        result.epochs.append(EpochResult(value, steps, time.perf_counter() - begin, score))
    return result


class _Run:
    """One call of train: what each step does."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        epochs: int,
        teach: Distillation | None,
        distill: float,
        mean: WeightAverage | None,
        dampening: float,
        threshold: float | None,
    ) -> None:
        self.model, self.loss, self.optimizer, self.epochs = model, loss, optimizer, epochs
        self.teach, self.distill, self.mean = teach, distill, mean
        self.dampening, self.threshold = dampening, threshold
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.example = ledger_of(model).example
        self.watch = self._watch()

    def _watch(self) -> Oscillations | None:
        wanted = self.dampening or self.threshold is not None
        return Oscillations(self.model, self.threshold) if wanted else None

    def change_bits(self, weight: int, activation: int) -> None:
        """Continue with other numbers of bits."""
        change_bits(self.model, weight, activation)
        self.watch = self._watch()

    def epoch(self, number: int, loader: Iterable[Any], progress: bool | None) -> tuple[float, int]:
        """Go through the data once; return the mean loss and the number of steps."""
        length = len(loader) if isinstance(loader, Sized) else None
        total, steps = 0.0, 0
        self.model.train()
        for batch in track(loader, f"epoch {number + 1}", show=progress):
            done = (number + (steps / length if length else 0.0)) / self.epochs
            value, steps = self.step(batch, 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))), steps + 1
            if not math.isfinite(value):
                raise CalibrationError(f"the loss is {value} at step {steps} of epoch {number + 1}: lower lr")
            total += value
        self.model.eval()
        if not steps:
            raise CalibrationError("the data to train with is empty: it yielded no batch")
        return total / steps, steps

    def finish(self, loader: Iterable[Any], *, norms: bool) -> None:
        """Apply the average of weights, and measure the statistics of BatchNorms with these weights."""
        if self.mean is not None:
            self.mean.apply()
        if norms and isinstance(loader, Iterator):
            _log.info("the loader cannot be read twice: BatchNorms keep the statistics from training")
        elif norms:
            batches = [_split(batch, self.example)[0] for batch in islice(loader, _FRESH)]
            reestimate_norms(self.model, batches, against_float=False, progress=False)

    def step(self, batch: object, fall: float) -> float:
        """Train on one batch with ``fall`` times the learning rates, and return the loss."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * fall
        given, target = _split(batch, self.example)
        inputs = as_inputs(given, len(self.example.args))
        prediction = inputs.run(self.model)
        value = self.loss(prediction, target)
        if self.teach is not None:
            given = inputs.copied()
            learned = self.teach(prediction, *given.args, **given.kwargs)
            value = (1.0 - self.distill) * value + self.distill * learned
        if self.watch is not None and self.dampening:
            value = value + self.dampening * (1.0 - fall) * self.watch.dampening()
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()
        if self.watch is not None:
            self.watch.step()
        if self.mean is not None:
            self.mean.update()
        return float(value.detach())


def _check_sizes(model: nn.Module) -> None:
    """Refuse weights of one size in layers with a folded BatchNorm: the norm's factor would drift with each batch."""
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLayer) and not layer.weight_quantizer.method.keeps_size and norm_place(layer):
            raise ConfigError(
                f"{name}: the weights of {layer.weight_quantizer.method_name} have one size, whatever the BatchNorm "
                "that is folded into them gives; train without batch_statistics, or prepare for a backend that keeps "
                "BatchNorms apart, such as 'academic'"
            )


def _check_options(loss: object, epochs: int, distill: float, teacher: nn.Module | None) -> None:
    if not callable(loss):
        raise ConfigError(f"loss must be a function such as torch.nn.functional.cross_entropy, not {loss!r}")
    if not isinstance(epochs, int) or epochs < 1:
        raise ConfigError(f"epochs must be a whole number of at least 1, not {epochs!r}")
    if not 0.0 <= distill <= 1.0:
        raise ConfigError(f"distill must be a share of the loss, from 0 to 1, not {distill!r}")
    if teacher is not None and not distill:
        raise ConfigError("a teacher is learned from only where distill is above 0, such as distill=0.5")


def _check_quantizers(model: nn.Module) -> None:
    found = quantizers(model)
    if not any(q.quantizes for q in found.values()):
        raise CalibrationError("no quantizer of the model is quantizing: calibrate it before training it")
    fixed = next((n for n, q in found.items() if getattr(q.method, "rounding", None) is not None), None)
    if fixed is not None:
        raise ConfigError(f"{fixed} has learned how to round weights, which training would move: train first")


def _check_bits(bits: object, epochs: int) -> None:
    """Refuse what does not name two numbers of bits for epochs that there are."""
    for epoch, pair in bits.items() if isinstance(bits, Mapping) else [(None, bits)] if bits is not None else ():
        if epoch not in range(epochs) or not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(
                f"bits must be a mapping from epochs below {epochs} to the bits of weights and activations, such as "
                f"{{0: (6, 6)}}, not {bits!r}"
            )


def _split(batch: object, example: Inputs) -> tuple[Any, Any]:
    """The inputs and the target of a batch; several inputs may be in a tuple or dict of their own."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        kind = type(batch).__name__
        raise ConfigError(
            "a batch to train with must be a tuple of the model's inputs and the target, such as (images, labels) or "
            f"({{'input_ids': …}}, labels), not a {kind}"
        )
    inputs = tuple(batch[:-1])
    inner = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], tuple | list | dict) else None
    wanted = example.args[0] if len(example.args) == 1 and not example.kwargs else None
    return (inputs if inner is None or isinstance(wanted, type(inner)) else inner), batch[-1]
