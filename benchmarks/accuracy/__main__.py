"""What few bits cost on Fashion-MNIST: ``make bench BENCH=accuracy``; ``python -m benchmarks.accuracy --help``.

The data is Debian's: ``apt-get install dataset-fashion-mnist``. Nets are trained once and kept in ~/.cache/bitwright.

W8A8 and W4A8 are what onnxruntime runs: every tensor between layers is quantized, BatchNorm is part of the weights.
W4A4, W3A3, W2A4 and W2A2 are what papers measure: only inputs and weights of convolutions and linear layers are
quantized, BatchNorm and sums stay float, and the first and last layers have weights and inputs of 8 bits. The stem's
output, which the second layer reads, has few bits.

Calibration and reconstruction see 512 training images, training batches of 64 others, 80 unless --batches says so.
Accuracy is that of 10,000 test images. Training learns from labels and from the float net in equal parts, and stands
beside a control: BatchNorms get the statistics of the same batches, and nothing else changes.

Each row is stored in the cache as soon as it is known, and taken from there by the next run; ``--again`` measures anew.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from benchmarks.accuracy.data import Split, load
from benchmarks.accuracy.float_models import float_model
from benchmarks.accuracy.nets import NETS, predict
from benchmarks.accuracy.rows import Row, kept
from bitwright.training import qat_recipe

BITS = ("W8A8", "W4A8", "W4A4", "W3A3", "W2A4")
LEARNED = ("adaround", "brecq", "qdrop")
CORRECTORS = (
    ("analytic_bias",),
    ("bias",),
    ("norms", "bias"),
    ("equalize", "norms", "bias"),
    ("gptq", "norms", "bias"),
)
TRAINED = ("W4A4", "W3A3", "W2A2")
WORDS = ("lsq", "lsq+", "pact", "dorefa", "dsq", "tqt", "apot")


class Bench:
    """One net with one seed."""

    def __init__(self, net: str, seed: int, options: argparse.Namespace, train: Split, test: Split) -> None:
        self.options, self.train, self.test, self.seed, self.net = options, train, test, seed, net
        self.model = float_model(net, seed, train, options.epochs)
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
        self.images = train.images[order[:512]]
        self.batches = [(train.images[i], train.labels[i]) for i in order[512 : 512 + options.batches * 64].split(64)]

    def accuracy(self, model: nn.Module) -> float:
        return 100 * float((predict(model, self.test.images) == self.test.labels).float().mean())

    def calibrated(self, recipe: bw.Recipe | dict) -> nn.Module:
        return bw.calibrate(bw.prepare(self.model, self.images[:8], recipe=recipe), self.images.split(128))

    def rows(self) -> Iterator[Row]:
        """Name of the bits, name of the method, accuracy and seconds."""
        yield "FP32", "", self.accuracy(self.model), 0.0
        for bits in self.options.bits:
            for name, make in self.after_training(bits):
                yield self._timed(bits, name, make)
        for bits in self.options.trained:
            for name in ("control", *self.options.words):
                yield self._timed(bits, f"train {name}", lambda n=name, b=bits: self.during_training(n, b))

    def _timed(self, bits: str, name: str, make: Callable[[], nn.Module]) -> Row:
        trained, learned = name.startswith("train"), name.startswith("MSE +")
        length = self.options.batches if trained else self.options.steps if learned else "any"
        key = self.net, self.options.epochs, self.seed, length, bits, name
        measure = lambda: self._measured(bits, name, make)  # noqa: E731
        return measure() if self.options.again else kept(key, measure)

    def _measured(self, bits: str, name: str, make: Callable[[], nn.Module]) -> Row:
        begin = time.perf_counter()
        model = make()
        seconds = time.perf_counter() - begin
        return bits, name, self.accuracy(model), seconds

    def after_training(self, bits: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        def recipe(observer: str) -> dict:
            return {"preset": bits, "weight": {"observer": observer}, "activation": {"observer": observer}}

        def learned(method: str) -> nn.Module:
            model = self.calibrated(recipe("MSEObserver"))
            print(bw.reconstruct(model, self.images.split(128), method, steps=self.options.steps, seed=self.seed))
            return model

        def corrected(steps: tuple[str, ...]) -> nn.Module:
            model = self.calibrated({"preset": bits})
            bw.correct(model, self.images.split(128), steps)
            return model

        yield "preset as it is", lambda: self.calibrated({"preset": bits})
        yield "min-max", lambda: self.calibrated(recipe("MinMaxObserver"))
        yield "MSE", lambda: self.calibrated(recipe("MSEObserver"))
        for steps in CORRECTORS:
            yield f"preset + {' '.join(steps)}", lambda s=steps: corrected(s)
        for method in self.options.methods:
            yield f"MSE + {method}", lambda m=method: learned(m)

    def during_training(self, word: str, bits: str) -> nn.Module:
        model = self.calibrated(qat_recipe("lsq" if word == "control" else word, bits))
        if word == "control":
            bw.reestimate_norms(model, [images for images, _ in self.batches], against_float=False)
        else:
            bw.train(model, self.batches, F.cross_entropy, lr=0.01, distill=0.5, batch_statistics=True)
        return model


def main() -> None:
    """Measure what is asked for, and print each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=5, help="of the float net")
    parser.add_argument("--steps", type=int, default=2000, help="of reconstruction, for each unit")
    parser.add_argument("--batches", type=int, default=80, help="of training")
    parser.add_argument("--bits", nargs="*", default=list(BITS), choices=BITS)
    parser.add_argument("--methods", nargs="*", default=list(LEARNED), choices=LEARNED)
    parser.add_argument("--trained", nargs="*", default=list(TRAINED), choices=TRAINED)
    parser.add_argument("--words", nargs="*", default=list(WORDS), choices=WORDS)
    parser.add_argument("--again", action="store_true", help="measure rows that are in the cache, too")
    options = parser.parse_args()
    train, test = load("train"), load("t10k")
    for net in options.nets:
        found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for seed in options.seeds:
            exact = 0.0
            for bits, name, accuracy, seconds in Bench(net, seed, options, train, test).rows():
                exact = accuracy if bits == "FP32" else exact
                found.setdefault((bits, name), []).append((accuracy, exact - accuracy, seconds))
                print(f"  {net} seed {seed}: {bits} {name}: {accuracy:.2f}, {seconds:.0f} s", flush=True)
        lengths = f"{options.steps} steps a unit, {options.batches} batches of training"
        print(f"\n{net}: {len(options.seeds)} seed(s), {lengths}\n")
        print(f"{'bits':<6}{'method':<30}{'accuracy':>9}{'drop':>8}{'spread':>8}{'seconds':>9}")
        for (bits, name), values in found.items():
            accuracy, drop, seconds = (statistics.mean(column) for column in zip(*values, strict=True))
            spread = f"{max(v[1] for v in values) - min(v[1] for v in values):.2f}" if len(values) > 1 else "–"
            print(f"{bits:<6}{name:<30}{accuracy:>9.2f}{drop:>8.2f}{spread:>8}{seconds:>9.0f}")
        print(flush=True)


if __name__ == "__main__":
    main()
