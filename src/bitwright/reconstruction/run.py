"""reconstruct: learn how weights are rounded, and scales of activations, unit by unit."""

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.calibration import add_note, as_batches, as_inputs, untaught_notes
from bitwright.checkpoints import digest_of
from bitwright.correction.reference import original_of
from bitwright.distributed import TIMEOUT, Ranks, all_ranks, rank
from bitwright.errors import CalibrationError, ConfigError
from bitwright.files import scratch_folder
from bitwright.graph import Inputs
from bitwright.graph.inputs import bind_inputs
from bitwright.graph.names import module_of
from bitwright.modes import eval_mode
from bitwright.nn.functional import QuantFunction
from bitwright.nn.weight_sites import weight_sites
from bitwright.preparation import ledger_of
from bitwright.progress import track
from bitwright.quantizer import TensorQuantizer, quantizers
from bitwright.reconstruction.checkpoint import UnitCheckpoints
from bitwright.reconstruction.columns import Memory
from bitwright.reconstruction.flow import Flow
from bitwright.reconstruction.learn import Lesson
from bitwright.reconstruction.learned import (
    LearnedScale,
    LearnedWeight,
    learnable_weights,
    learns_scale,
    start_from,
)
from bitwright.reconstruction.losses import prediction_gap
from bitwright.reconstruction.result import Reconstruction, UnitResult
from bitwright.reconstruction.samples import Samples
from bitwright.reconstruction.settings import LossName, MethodName, Settings, UnitKind
from bitwright.reconstruction.switch import switched_off
from bitwright.reconstruction.units import Unit, find_units
from bitwright.reconstruction.whole import graph_of, outputs_apart, tensors_in

_APART = 1_000_003  # between the seeds of ranks
_GREW = (
    "reconstruction brought each unit's results closer to the float ones, but not the model's: their error grew from "
    "{:.3g} to {:.3g}; more data, merge=2 or prediction=1 may help"
)


@torch.inference_mode(False)  # what it learns needs gradients
def reconstruct(
    model: nn.Module,
    batches: Iterable[Any],
    method: MethodName = "qdrop",
    unit: UnitKind = "auto",
    *,
    loss: LossName = "mse",
    steps: int = 1000,
    batch_size: int = 32,
    lr: float = 1e-2,
    scale_lr: float = 1e-3,
    warmup: float = 0.2,
    beta: tuple[float, float] = (20.0, 2.0),
    rounding_weight: float = 3.0,
    keep: float | None = None,
    merge: int = 1,
    prediction: float = 0.0,
    temperature: float = 1.0,
    weight_scale_lr: float = 0.0,
    memory_limit: float = 4e9,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    progress: bool | None = None,
    timeout: float = TIMEOUT,
) -> Reconstruction:
    """Learn how the weights of a calibrated model are rounded, unit by unit, to approach the float model.

    A unit's inputs come from the quantized model, with all earlier units done; its targets are the results of the float
    model, before corrections changed its parameters. What was learned is kept only where it is better than before. The
    float weights do not change, except that those rounded by GPTQ are float again where learning them is better; scales
    of weights change only if ``weight_scale_lr`` is given.

    Under ``torchrun`` each rank passes its own share of the data, and draws its share of ``batch_size`` from it. All
    learn the same from the mean of their gradients. A rank that fails, or has no data, is an error on all.

    Args:
        model: what ``calibrate`` returned; it is changed in place.
        batches: data as for ``calibrate``; 500 to 1000 samples are usual. No labels are needed.
        method: ``"adaround"`` learns weights with float activations inside the unit; ``"brecq"`` then learns scales of
            activations; ``"qdrop"`` learns both at once, with each activation quantized at random. Activations of 8 or
            more bits stay float while weights learn, and keep their scales.
        unit: ``"layer"``, ``"block"`` (residual and attention blocks, found in the graph), or ``"auto"``: layers for
            AdaRound, blocks for the others.
        loss: ``"mse"``, or ``"fisher"``: squared errors weighted by how much they matter for the predictions.
        steps: training steps per unit; papers have 20,000, with ``lr=1e-3``.
        batch_size: samples per step; a whole batch if the model mixes its samples.
        lr: learning rate of roundings (Adam).
        scale_lr: learning rate of activation scales, relative to their size.
        warmup: share of the steps without the rounding regulariser.
        beta: exponent of the regulariser, from and to.
        rounding_weight: strength of the regulariser half-way, relative to the error of nearest rounding; it grows from
            1/30 to 30 times that.
        keep: probability that an activation is quantized (``"qdrop"``), even one of 8 or more bits; by default 0.5 for
            activations of fewer than 8 bits.
        merge: number of neighbouring units to learn as one.
        prediction: weight of PD-Quant's loss, the Kullback-Leibler divergence between the float model's predictions and
            those that its later units compute from this unit's results. 1 weighs it like the unit's error, both as
            shares of their values before learning. Each step then also computes the rest of the model.
        temperature: divisor of the logits in that loss; the paper uses 4 for ResNets and 1 for MobileNets.
        weight_scale_lr: learning rate of weight scales, relative to their size, with the integers between which weights
            are rounded kept (Genie); 0 leaves scales alone, 1e-3 suits the other defaults.
        memory_limit: bytes of activations kept in memory; more go to a temporary folder.
        checkpoint: folder where finished units are stored; the same call continues from there.
        seed: for all randomness in learning. The model's own randomness comes from torch's generator.
        progress: show a progress bar; by default only on a terminal.
        timeout: how long a rank waits for the others, in seconds.

    Returns:
        The error of every unit, and of the model's results, before and after; ``print`` shows it as a table. A unit's
        error never grows, that of the model may; then the log and the ledger say so.
    """
    if not isinstance(memory_limit, int | float) or not memory_limit >= 0:
        raise ConfigError(f"reconstruct: memory_limit must be a number of bytes of at least 0, not {memory_limit!r}")
    settings = Settings(
        *(method, unit, loss, steps, batch_size, lr, scale_lr, warmup, beta, rounding_weight, keep, merge),
        *(prediction, temperature, weight_scale_lr, seed),
    )
    ledger = ledger_of(model)
    example, untaught = ledger.example, untaught_notes(q for q in quantizers(model).values() if q.enabled)
    if not any(q.quantizes for q in quantizers(model).values()):
        raise CalibrationError("no quantizer of the model is quantizing: calibrate it before reconstructing it")
    with all_ranks(timeout) as ranks, scratch_folder(tempfile.gettempdir()) as folder, _learning(model):
        with ranks.together(CalibrationError):
            inputs = [as_inputs(batch, len(example.args)) for batch in as_batches(batches)]
            if not inputs:
                raise CalibrationError("the data to reconstruct with is empty: it yielded no batch")
            _check_data(model, inputs)
        if not ranks.alone:
            ranks.agree("the model", digest_of(dict(model.state_dict())))
            ranks.agree("the choice of settings", digest_of(repr(settings)))
        memory, original = Memory(memory_limit, folder), original_of(model)
        stored = None
        if checkpoint is not None:
            data = [value for each in inputs for value in (each.args, each.kwargs)]
            data += [] if original is None else [original.state]
            stored = UnitCheckpoints(checkpoint, model, settings, data, ranks)
        graph = graph_of(model, example)
        job = _Job(graph, settings, stored, ranks)
        if original is not None:
            start_from(original.state, graph, [weight for unit in job.weights for weight in unit])
        values = [bind_inputs(model, each.args, each.kwargs) for each in inputs]
        twin, found = model if original is None else original.twin(model), list(quantizers(model).values())
        exact = graph if original is None else graph_of(twin, example)
        before = outputs_apart(model, twin, inputs, found, ranks)
        result = job.run(Flow(graph, exact, job.units, values, found, memory), progress)
        result.before, result.after = before, outputs_apart(model, twin, inputs, found, ranks)
        if original is not None:
            original.keep(model)
    taught = {"adaround", settings.method}  # every method learns how weights are rounded
    ledger.notes = [note for note in ledger.notes if untaught.get(note) not in taught]
    if result.after > result.before:
        add_note(model, _GREW.format(result.before, result.after))
    return result


def _check_data(model: nn.Module, inputs: Sequence[Inputs]) -> None:
    """Refuse batches that the model refuses, or whose results in float are NaN."""
    for number, batch in enumerate(inputs, start=1):
        try:
            with switched_off(list(quantizers(model).values())):
                results = tensors_in(batch.run(model))
        except Exception as error:
            raise CalibrationError(
                f"the model refuses batch {number} {batch} of the data to reconstruct with: "
                f"{type(error).__name__}: {error}"
            ) from error
        if any(bool(result.isnan().any()) for result in results):
            raise CalibrationError(f"batch {number} of the data to reconstruct with makes NaN in float; check the data")


class _Job:
    """One call of reconstruct."""

    def __init__(
        self, model: fx.GraphModule, settings: Settings, checkpoint: UnitCheckpoints | None, ranks: Ranks
    ) -> None:
        self.model, self.settings, self.checkpoint, self.ranks = model, settings, checkpoint, ranks
        weights = {node: learnable_weights(model, node) for node in model.graph.nodes}
        if not any(weights.values()):
            raise ConfigError(
                "the model has no weight whose rounding can be learned: none is quantized to evenly spaced integers"
            )
        self.units = find_units(model, lambda node: bool(weights[node]), settings.unit_kind, settings.merge)
        taken: set[TensorQuantizer] = set()  # a layer that is called again has already learned
        self.weights: list[list[LearnedWeight]] = []
        for unit in self.units:
            found = {w.quantizer: w for node in unit.nodes for w in weights[node] if w.quantizer not in taken}
            taken |= set(found)
            self.weights.append(list(found.values()))
        self.activations = [self._activations(unit) for unit in self.units]

    def _activations(self, unit: Unit) -> list[TensorQuantizer]:
        """The quantizers in a unit that quantize something other than weights."""
        of_weights = {site.quantizer for site in weight_sites(self.model)}
        of_weights |= {m.weight_quantizer for m in self.model.modules() if isinstance(m, QuantFunction)}
        found: dict[TensorQuantizer, None] = {}
        for node in unit.nodes:
            module = module_of(node, self.model)
            for quantizer in quantizers(module).values() if module is not None else ():
                if quantizer.quantizes and quantizer not in of_weights:
                    found[quantizer] = None
        return list(found)

    def _scales(self, number: int) -> list[LearnedScale]:
        """The activations of a unit whose scales are learned: coarse ones that belong to no other unit."""
        if self.settings.method == "adaround":
            return []
        elsewhere = {q for i, found in enumerate(self.activations) if i != number for q in found}
        most = 7 if self.settings.keep is None else 16  # bits
        own = [q for q in self.activations[number] if q not in elsewhere]
        return [LearnedScale(q.label, q) for q in own if learns_scale(q, most)]

    def run(self, flow: Flow, progress: bool | None) -> Reconstruction:
        """Learn every unit."""
        result = Reconstruction(self.settings.method)
        importance = flow.importance() if self.settings.loss == "fisher" else None
        if importance is not None:
            importance.join(self.ranks)
        for number in track(range(len(self.units)), "reconstructing", show=progress):
            begin = time.perf_counter()
            flow.enter(number)
            targets = flow.targets(number)
            if self.weights[number] and targets:
                weigh = [None if importance is None else importance.of(node) for node in targets]
                done = self._learn(number, flow, targets, weigh, begin)
                result.units.append(done)
            flow.leave(number)
        return result

    def _learn(
        self, number: int, flow: Flow, targets: Sequence[fx.Node], weigh: list[Tensor | None], begin: float
    ) -> UnitResult:
        weights, scales = self.weights[number], self._scales(number)
        for weight in weights:
            weight.make_room()
        outputs = flow.units[number].outputs
        call = _Chosen(flow.calls[number], [outputs.index(node) for node in targets])
        known = None if self.checkpoint is None else self.checkpoint.load(number, weights, scales)
        if known is None:
            samples = flow.samples(number, predictions=self.settings.prediction > 0)
            known = self._improve(number, samples, call, weigh, scales, begin)
            if self.checkpoint is not None:
                self.checkpoint.save(number, known, weights, scales)
        for weight in weights:
            weight.make_room()
        return known

    def _improve(
        self,
        number: int,
        samples: Samples,
        call: nn.Module,
        weigh: list[Tensor | None],
        scales: list[LearnedScale],
        begin: float,
    ) -> UnitResult:
        weights, settings = self.weights[number], self.settings
        powers = self._mean(([target.square() for target in s.targets] for s in samples), weigh)
        share = [1.0 / max(power, 1e-30) for power in powers]

        def error() -> float:
            found = self._mean(
                ([(r - t).square() for r, t in zip(call(*s.quantized), s.targets, strict=True)] for s in samples), weigh
            )
            return sum(e * p for e, p in zip(found, share, strict=True))

        own, gap = error(), self._gap(call, samples)
        weight_of_gap = settings.prediction * own / gap if gap else 0.0
        before, after, steps = own + weight_of_gap * gap, float("inf"), 0
        if own > 0.0:
            source = torch.Generator().manual_seed(settings.seed + number + _APART * rank())
            lesson = Lesson(
                call,
                samples,
                weigh,
                [p / before for p in share],
                weight_of_gap / before,
                weights,
                scales,
                self.activations[number],
                settings,
                self.ranks,
            )
            try:
                with torch.enable_grad():
                    steps = lesson.learn(source)
                for weight in weights:
                    weight.make_room()
                after = error() + weight_of_gap * self._gap(call, samples)
            finally:
                kept = after < before
                if not kept:
                    for learned in (*weights, *scales):
                        learned.restore()
        kept = after < before
        return UnitResult(
            self.units[number].name,
            tuple(w.name for w in weights),
            len(scales),
            before,
            after if kept else before,
            kept,
            steps,
            time.perf_counter() - begin,
        )

    def _gap(self, call: nn.Module, samples: Samples) -> float:
        """How far predictions are from the float model's before learning, if they count."""
        if samples.rest is None:
            return 0.0
        by = self.settings.temperature
        gaps = [float(prediction_gap(samples.rest(call(*s.quantized), s.others), s.predictions, by)) for s in samples]
        total, count = self.ranks.sum([sum(gaps), len(gaps)])
        return total / count

    def _mean(self, squares: Iterable[list[Tensor]], weigh: list[Tensor | None]) -> list[float]:
        """The mean of each result's values over all batches of all ranks, weighted."""
        total, count = [0.0] * len(weigh), [0] * len(weigh)
        for batch in squares:
            for i, (square, weight) in enumerate(zip(batch, weigh, strict=True)):
                total[i] += float((square if weight is None else square * weight).sum(dtype=torch.float64))
                count[i] += square.numel()
        sums = self.ranks.sum([*total, *count])
        return [t / max(c, 1.0) for t, c in zip(sums[: len(total)], sums[len(total) :], strict=True)]


class _Chosen(nn.Module):
    """A unit that returns only some of its results."""

    def __init__(self, call: nn.Module, chosen: list[int]) -> None:
        super().__init__()
        self.call, self.chosen = call, chosen

    def forward(self, *values: object) -> list[Any]:
        results = self.call(*values)
        return [results[i] for i in self.chosen]


@contextmanager
def _learning(model: nn.Module) -> Iterator[None]:
    """Evaluate the model without gradients of its own Parameters."""
    asked = [p for p in model.parameters() if p.requires_grad]
    with eval_mode(model), torch.no_grad():
        for parameter in asked:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in asked:
                parameter.requires_grad_(True)
