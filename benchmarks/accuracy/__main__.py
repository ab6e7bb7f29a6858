"""What few bits cost on Fashion-MNIST: ``make bench BENCH=accuracy``; ``python -m benchmarks.accuracy --help``.

The data is Debian's: ``apt-get install dataset-fashion-mnist``. Nets are trained once and kept in ~/.cache/bitwright.

W8A8 and W4A8 are what onnxruntime runs: every tensor between layers is quantized, BatchNorm is part of the weights.
W4A4, W3A3, W2A4 and W2A2 are what papers measure: only inputs and weights of convolutions and linear layers are
quantized, BatchNorm and sums stay float, and the first and last layers have weights and inputs of 8 bits. The stem's
output, which the second layer reads, has few bits.

Calibration and reconstruction see 512 training images, training batches of 64 others, 80 unless --batches says so.
Accuracy is that of 10,000 test images. A model that gives 98 % of them the float net's class may gain or lose 0.15
points by chance; agreement and KL divergence (in thousandths) tell methods apart with a single seed. Training learns
from labels and from the float net in equal parts, and stands beside a control: BatchNorms get the statistics of the
same batches, and nothing else changes.

Each row is stored in the cache as soon as it is known, and taken from there by the next run; ``--again`` measures anew.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        self.logits = predict(self.model, test.images)
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
        self.images = train.images[order[:512]]
        self.batches = [(train.images[i], train.labels[i]) for i in order[512 : 512 + options.batches * 64].split(64)]

    def calibrated(self, recipe: bw.Recipe | dict) -> nn.Module:
        return bw.calibrate(bw.prepare(self.model, self.images[:8], recipe=recipe), self.images.split(128))

    def rows(self) -> Iterator[Row]:
        """The float net, and then each method."""
        yield self._judged("FP32", "", self.logits)
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
        clocks = time.perf_counter, time.process_time
        begin = [clock() for clock in clocks]
        model = make()
        seconds, processor = (clock() - start for clock, start in zip(clocks, begin, strict=True))
        return self._judged(bits, name, predict(model, self.test.images))._replace(seconds=seconds, processor=processor)

    def _judged(self, bits: str, name: str, logits: Tensor) -> Row:
        right, same = (logits.argmax(1) == c for c in (self.test.labels, self.logits.argmax(1)))
        gap = F.kl_div(logits.log_softmax(1), self.logits.log_softmax(1), reduction="batchmean", log_target=True)
        return Row(bits, name, 100 * float(right.float().mean()), 100 * float(same.float().mean()), float(gap))

    def after_training(self, bits: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        def recipe(observer: str) -> dict:
            return {"preset": bits, "weight": {"observer": observer}, "activation": {"observer": observer}}

        def learned(method: str, first: tuple[str, ...]) -> nn.Module:
            model = self.calibrated(recipe("MSEObserver"))
            bw.correct(model, self.images.split(128), first)
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
            yield f"MSE + {method}", lambda m=method: learned(m, ())
            yield f"MSE + norms bias {method}", lambda m=method: learned(m, ("norms", "bias"))

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
    parser.add_argument("--steps", type=int, default=1000, help="of reconstruction, for each unit")
    parser.add_argument("--batches", type=int, default=80, help="of training")
    parser.add_argument("--bits", nargs="*", default=list(BITS), choices=BITS)
    parser.add_argument("--methods", nargs="*", default=list(LEARNED), choices=LEARNED)
    parser.add_argument("--trained", nargs="*", default=list(TRAINED), choices=TRAINED)
    parser.add_argument("--words", nargs="*", default=list(WORDS), choices=WORDS)
    parser.add_argument("--again", action="store_true", help="measure rows that are in the cache, too")
    options = parser.parse_args()
    train, test = load("train"), load("t10k")
    for net in options.nets:
        found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
        for seed in options.seeds:
            exact = 0.0
            for row in Bench(net, seed, options, train, test).rows():
                exact = row.accuracy if row.bits == "FP32" else exact
                values = row.accuracy, exact - row.accuracy, row.agreement, 1000 * row.divergence, row.seconds
                found.setdefault((row.bits, row.method), []).append((*values, row.processor))
                print(f"  {net} seed {seed}: {row}", flush=True)
        lengths = f"{options.steps} steps a unit, {options.batches} batches of training"
        print(f"\n{net}: {len(options.seeds)} seed(s), {lengths}\n")
        print(
            f"{'bits':<6}{'method':<30}{'accuracy':>9}{'drop':>8}{'spread':>8}{'agree':>8}{'KL':>8}{'s':>6}{'CPU s':>7}"
        )
        for (bits, name), rows in found.items():
            accuracy, drop, agreement, gap, seconds, processor = map(statistics.mean, zip(*rows, strict=True))
            spread = f"{max(v[1] for v in rows) - min(v[1] for v in rows):.2f}" if len(rows) > 1 else "–"
            print(f"{bits:<6}{name:<30}{accuracy:>9.2f}{drop:>8.2f}{spread:>8}", end="")
            print(f"{agreement:>8.2f}{gap:>8.2f}{seconds:>6.0f}{processor:>7.0f}")
        print(flush=True)


if __name__ == "__main__":
    main()
