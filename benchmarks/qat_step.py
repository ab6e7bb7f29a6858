"""What a training step costs with LSQ W4A4 beside float: ``make bench BENCH=qat_step``."""

import copy
import ctypes
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ["BITWRIGHT_COMPILE"] = "1"

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import bitwright as bw
from benchmarks.nets import NETS, randomize_batchnorm
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.methods import parameter_groups

RUNS, BATCH, SIZE = 6, 16, 64
ACADEMIC = dataclasses.replace(
    ONNXRUNTIME, activation_formats=frozenset(), weight_formats=frozenset(), name="academic-bench"
)
RECIPE = {
    "weight": {"spec": "int4 narrow channel:0", "method": "LearnableFakeQuantize"},
    "activation": {"spec": "uint4 affine", "method": "LearnableFakeQuantize"},
}


def resident() -> int:
    """Bytes of memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak(function: Callable[[], None]) -> int:
    """Bytes that a function needs at most, beyond what is in use before, sampled every millisecond."""
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed; give it back, or nothing more is ever needed
    done, highest, before = threading.Event(), [0], resident()

    def watch() -> None:
        while not done.wait(0.001):
            highest[0] = max(highest[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    function()
    done.set()
    thread.join()
    return highest[0] - before


def step_of(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """One step of SGD as a function."""
    optimizer = torch.optim.SGD(parameter_groups(model, lr=1e-3), momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table(title=f"One training step, batch {BATCH}, {SIZE}x{SIZE}, LSQ W4A4 / float")
    for column in ("network", "float", "LSQ", "time", "goal", "float memory", "LSQ memory", "memory", "goal"):
        table.add_column(column)
    for name in ("resnet18", "mobilenet_v2"):
        model = NETS[name]()
        randomize_batchnorm(model, 0)
        x, labels = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(0, 1000, (BATCH,))
        qmodel = bw.calibrate(bw.prepare(copy.deepcopy(model).eval(), x, ACADEMIC, recipe=RECIPE), [x]).train()
        steps = {"float": step_of(model.train(), x, labels), "lsq": step_of(qmodel, x, labels)}
        times, needs = dict.fromkeys(steps, float("inf")), dict.fromkeys(steps, 0)
        for run in range(RUNS + 2):
            for which, step in steps.items():
                start = time.process_time()
                step()
                if run >= 2:
                    times[which] = min(times[which], time.process_time() - start)
        for which, step in steps.items():
            needs[which] = peak(step)
        table.add_row(
            name,
            *(f"{times[w] * 1e3:.0f} ms" for w in steps),
            f"{times['lsq'] / times['float']:.2f}x",
            "1.25x",
            *(f"{needs[w] / 2**20:.0f} MB" for w in steps),
            f"{needs['lsq'] / max(needs['float'], 1):.2f}x",
            "1.3x",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
