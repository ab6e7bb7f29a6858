"""Bench: one float net, and every way to give it few bits, as rows of the table."""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright as bw
from benchmarks.accuracy.data import Split
from benchmarks.accuracy.float_models import float_model
from benchmarks.accuracy.nets import predict
from benchmarks.accuracy.peers import Task, peers_for
from benchmarks.accuracy.rows import Row, kept
from bitwright.quantizer import quantizers
from bitwright.training import qat_recipe

CORRECTORS = (
    ("analytic_bias",),
    ("bias",),
    ("norms", "bias"),
    ("equalize", "norms", "bias"),
    ("gptq", "norms", "bias"),
)
DEPLOYED = "W8A8", "W4A8"
SHAKES = 0.98, 1.02  # a default that hangs on luck falls apart with ranges a little smaller or larger
Model = Callable[[Tensor], Tensor]
Way = tuple[str, Callable[[], Model]]


class Bench:
    """One net with one seed."""

    def __init__(self, net: str, seed: int, options: argparse.Namespace, train: Split, test: Split) -> None:
        self.options, self.train, self.test, self.seed, self.net = options, train, test, seed, net
        self.model = float_model(net, seed, train, options.epochs)
        self.logits = predict(self.model, test.images)
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
        self.images = train.images[order[:512]]
        self.batches = [(train.images[i], train.labels[i]) for i in order[512 : 512 + options.batches * 64].split(64)]

    def calibrated(self, recipe: bw.Recipe | dict, *, correct: bool = False) -> nn.Module:
        """The net with quantizers that have seen the images for calibration."""
        return bw.calibrate(
            bw.prepare(self.model, self.images[:8], recipe=recipe), self.images.split(128), correct=correct
        )

    def rows(self) -> Iterator[Row]:
        """The float net, and then each method."""
        yield self._judged("FP32", "", self.logits)
        for bits in self.options.bits:
            for way in self.after_training(bits):
                yield from self._timed(bits, *way)
            yield from self._of_peers(bits)
        for bits in self.options.trained:
            for name in ("control", *self.options.words):
                yield from self._timed(bits, f"train {name}", lambda n=name, b=bits: self.during_training(n, b))

    def _of_peers(self, bits: str) -> Iterator[Row]:
        """Other packages; one that fails says so and is left out."""
        task = Task(self.model, self.images, int(bits[1]), int(bits[3]), self.options.steps)
        for name, make in peers_for(task).items():
            try:
                yield from self._timed(bits, name, make)
            except Exception as error:
                print(f"  {name} does not run with {bits}: {type(error).__name__}: {error}", flush=True)

    def _timed(self, bits: str, name: str, make: Callable[[], Model]) -> Iterator[Row]:
        if self.options.rows is not None and name not in self.options.rows:
            return
        trained, learned = name.startswith("train"), name.startswith(("MSE +", "preset,", "AIMET"))
        passes = f"{len(self.batches)}x{self.options.passes}"
        length = passes if trained else self.options.steps if learned else "any"
        key = self.net, self.options.epochs, self.seed, length, bits, name
        measure = lambda: self._measured(bits, name, make)  # noqa: E731
        yield measure() if self.options.again else kept(key, measure)

    def _measured(self, bits: str, name: str, make: Callable[[], Model]) -> Row:
        clocks = time.perf_counter, time.process_time
        begin = [clock() for clock in clocks]
        model = make()
        seconds, processor = (clock() - start for clock, start in zip(clocks, begin, strict=True))
        return self._judged(bits, name, predict(model, self.test.images))._replace(seconds=seconds, processor=processor)

    def _judged(self, bits: str, name: str, logits: Tensor) -> Row:
        right, same = (logits.argmax(1) == c for c in (self.test.labels, self.logits.argmax(1)))
        gap = F.kl_div(logits.log_softmax(1), self.logits.log_softmax(1), reduction="batchmean", log_target=True)
        return Row(bits, name, 100 * float(right.float().mean()), 100 * float(same.float().mean()), float(gap))

    def after_training(self, bits: str) -> Iterator[Way]:
        """Calibration with several observers, correctors, reconstruction; and files as onnxruntime runs them."""

        def recipe(observer: str) -> dict:
            return {"preset": bits, "weight": {"observer": observer}, "activation": {"observer": observer}}

        def learned(model: nn.Module, method: str, first: tuple[str, ...] = ()) -> nn.Module:
            bw.correct(model, self.images.split(128), first)
            print(bw.reconstruct(model, self.images.split(128), method, steps=self.options.steps, seed=self.seed))
            return model

        def corrected(steps: tuple[str, ...], factor: float = 1.0) -> nn.Module:
            model = with_ranges(self.calibrated({"preset": bits}), factor)
            bw.correct(model, self.images.split(128), steps)
            return model

        yield "preset", lambda: self.calibrated({"preset": bits}, correct=True)
        yield "preset as it is", lambda: corrected(())
        for factor in SHAKES:
            yield f"ranges x {factor}", lambda f=factor: corrected((), f)
            yield f"ranges x {factor} + norms bias", lambda f=factor: corrected(("norms", "bias"), f)
        yield "min-max", lambda: self.calibrated(recipe("MinMaxObserver"))
        yield "MSE", lambda: self.calibrated(recipe("MSEObserver"))
        for steps in CORRECTORS:
            yield f"preset + {' '.join(steps)}", lambda s=steps: corrected(s)
        for method in self.options.methods:
            yield f"preset, {method}", lambda m=method: learned(self.calibrated({"preset": bits}, correct=True), m)
            yield f"MSE + {method}", lambda m=method: learned(self.calibrated(recipe("MSEObserver")), m)
            yield (
                f"MSE + norms bias {method}",
                lambda m=method: learned(self.calibrated(recipe("MSEObserver")), m, ("norms", "bias")),
            )
        if bits in DEPLOYED:
            yield "file of preset", lambda: deployed(corrected(()))
            yield "file of preset + gptq norms bias", lambda: deployed(corrected(("gptq", "norms", "bias")))

    def during_training(self, word: str, bits: str) -> nn.Module:
        """Training with quantizers, or the control."""
        model = self.calibrated(qat_recipe("lsq" if word == "control" else word, bits))
        if word == "control":
            bw.reestimate_norms(model, [images for images, _ in self.batches], against_float=False)
        else:
            settings = {"epochs": self.options.passes, "lr": 0.01, "distill": 0.5, "batch_statistics": True}
            bw.train(model, self.batches, F.cross_entropy, **settings)
        return model


def with_ranges(model: nn.Module, factor: float) -> nn.Module:
    """The model with every range this many times as wide."""
    for quantizer in quantizers(model).values():
        scale, zero_point = quantizer.qparams()
        quantizer.set_qparams(scale * factor, zero_point)
    return model


def deployed(model: nn.Module) -> Model:
    """The exported file as onnxruntime runs it."""
    with tempfile.TemporaryDirectory() as folder:
        bw.export(model, Path(folder) / "model.onnx")
        return bw.run_file(Path(folder) / "model.onnx", "onnxruntime")
