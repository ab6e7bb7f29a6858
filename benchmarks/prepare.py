"""What preparing, calibrating and importing cost: ``make bench BENCH=prepare``."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

import bitwright as bw
from benchmarks.nets import NETS, example_input, randomize_batchnorm

RUNS = 7


def best(functions: dict[str, Callable[[], Any]], runs: int = RUNS) -> dict[str, float]:
    """Best time of each function in seconds, interleaved."""
    times = dict.fromkeys(functions, float("inf"))
    for _ in range(runs):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def import_seconds(statement: str) -> float:
    """Best time of a fresh interpreter that runs a statement, with compiled files as an installed package has them."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        for _ in range(6):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
            times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table(title="Cost of Bitwright's stages, in units of the plain thing")
    for column in ("stage", "network", "plain", "Bitwright", "ratio", "goal"):
        table.add_column(column)

    def row(stage: str, net: str, plain: float, ours: float, goal: str) -> None:
        table.add_row(stage, net, f"{plain * 1e3:.0f} ms", f"{ours * 1e3:.0f} ms", f"{ours / plain:.2f}x", goal)

    for name, build in NETS.items():
        model = build().eval()
        randomize_batchnorm(model, 0)
        small = torch.randn(1, 3, 64, 64)
        times = best({"trace": lambda m=model: fx.symbolic_trace(m), "ours": lambda m=model, x=small: bw.prepare(m, x)})
        row("prepare / fx.symbolic_trace, 64x64 example", name, times["trace"], times["ours"], "5x (DenseNet)")
    for name in ("resnet18", "mobilenet_v2", "densenet121"):
        model = NETS[name]().eval()
        randomize_batchnorm(model, 0)
        batches = [example_input(name, 4) for _ in range(4)]
        qmodel = bw.prepare(model, batches[0])

        def forwards(model: torch.nn.Module = model, batches: list[torch.Tensor] = batches) -> None:
            with torch.no_grad():
                for batch in batches:
                    model(batch)

        times = best({"plain": forwards, "ours": lambda q=qmodel, b=batches: bw.calibrate(q, b)}, runs=5)
        row("calibrate / plain forwards", name, times["plain"], times["ours"], "1.3x")
    plain = import_seconds("import torch")
    ours = import_seconds("import torch, bitwright; bitwright.prepare; bitwright.calibrate")
    table.add_row("import", "", f"{plain:.2f} s (torch)", f"{ours:.2f} s", f"+{ours - plain:.2f} s", "+0.3 s")
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
