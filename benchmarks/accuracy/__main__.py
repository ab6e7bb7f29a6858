"""What few bits cost on Fashion-MNIST: ``make bench BENCH=accuracy``; ``python -m benchmarks.accuracy --help``.

The data is Debian's: ``apt-get install dataset-fashion-mnist``. Nets are trained once and kept in ~/.cache/bitwright.

W8A8 and W4A8 are what onnxruntime runs: every tensor between layers is quantized, BatchNorm is part of the weights.
"preset" is what ``bw.calibrate`` gives, "preset as it is" leaves its corrections out.
Rows that begin with "file of" are of the exported file, run in onnxruntime on all test images.
W4A4, W3A3, W2A4 and W2A2 are what papers measure: only inputs and weights of convolutions and linear layers are
quantized, BatchNorm and sums stay float, and the first and last layers have weights and inputs of 8 bits. The stem's
output, which the second layer reads, has few bits.

Calibration and reconstruction see 512 training images, training --batches batches of 64 others, --passes times.
Accuracy is that of 10,000 test images. A model that gives 98 % of them the float net's class may gain or lose 0.15
points by chance; agreement and KL divergence (in thousandths) tell methods apart with a single seed. Training learns
from labels and from the float net in equal parts, and stands beside a control: BatchNorms get the statistics of the
same batches, and nothing else changes.

Other packages take part if they are installed: see :mod:`benchmarks.accuracy.peers`.

Each row is stored in the cache as soon as it is known, and taken from there by the next run; ``--again`` measures anew.
"""

import argparse
import statistics

from benchmarks.accuracy.bench import Bench
from benchmarks.accuracy.data import load
from benchmarks.accuracy.nets import NETS

BITS = ("W8A8", "W4A8", "W4A4", "W3A3", "W2A4")
LEARNED = ("adaround", "brecq", "qdrop")
TRAINED = ("W4A4", "W3A3", "W2A2")
WORDS = ("lsq", "lsq+", "pact", "dorefa", "dsq", "tqt", "apot")


def main() -> None:
    """Measure what is asked for, and print each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=5, help="of the float net")
    parser.add_argument("--steps", type=int, default=1000, help="of reconstruction, for each unit")
    parser.add_argument("--batches", type=int, default=80, help="of training")
    parser.add_argument("--passes", type=int, default=1, help="of training over these batches")
    parser.add_argument("--bits", nargs="*", default=list(BITS), choices=BITS)
    parser.add_argument("--methods", nargs="*", default=list(LEARNED), choices=LEARNED)
    parser.add_argument("--trained", nargs="*", default=list(TRAINED), choices=TRAINED)
    parser.add_argument("--words", nargs="*", default=list(WORDS), choices=WORDS)
    parser.add_argument("--rows", nargs="*", help="only rows of these names, such as 'preset as it is' 'MSE + qdrop'")
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
        lengths = f"{options.steps} steps a unit, {options.passes} x {options.batches} batches of training"
        print(f"\n{net}: {len(options.seeds)} seed(s), {lengths}\n")
        print(
            f"{'bits':<6}{'method':<34}{'accuracy':>9}{'drop':>8}{'spread':>8}{'agree':>8}{'KL':>8}{'s':>6}{'CPU s':>7}"
        )
        for (bits, name), rows in found.items():
            accuracy, drop, agreement, gap, seconds, processor = map(statistics.mean, zip(*rows, strict=True))
            spread = f"{max(v[1] for v in rows) - min(v[1] for v in rows):.2f}" if len(rows) > 1 else "–"
            print(f"{bits:<6}{name:<34}{accuracy:>9.2f}{drop:>8.2f}{spread:>8}", end="")
            print(f"{agreement:>8.2f}{gap:>8.2f}{seconds:>6.0f}{processor:>7.0f}")
        print(flush=True)


if __name__ == "__main__":
    main()
