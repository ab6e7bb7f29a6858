"""What methods cost, in units of ``x.clone()``, next to torch, torchao and Brevitas: ``make bench BENCH=numerics``.

Memory is used again, as in a training loop that has warmed up: neither the clone nor a method waits for new pages.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["BITWRIGHT_COMPILE"] = "1"

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.peers import MISSING, peers
from bitwright.methods import METHODS
from bitwright.spec import QuantSpec

RUNS = 15
STRAIGHT, SMOOTH, FREE = (2.0, 4.0), (5.0, 9.0), (None, None)
METHODS_AND_GOALS: dict[str, tuple[float | None, float | None]] = {
    "FixedFakeQuantize": STRAIGHT,
    "LearnableFakeQuantize": STRAIGHT,
    "LSQPlusFakeQuantize": STRAIGHT,
    "PACTFakeQuantize": STRAIGHT,
    "TqtFakeQuantize": STRAIGHT,
    "DoReFaFakeQuantize": SMOOTH,
    "DSQFakeQuantize": SMOOTH,
    "AdaRoundFakeQuantize": SMOOTH,
    "NNIEFakeQuantize": FREE,
    "APoTFakeQuantize": FREE,
    "QDropFakeQuantize": FREE,
    "StochasticFakeQuantize": FREE,
}
FACTORS = {"torch learnable (C++)": 4.0, "Brevitas": 6.0}  # how much faster LSQ must be
CASES = {
    "activation 64x64x56x56, one scale": ((64, 64, 56, 56), "uint4 symmetric"),
    "activation 16x64x56x56, one scale": ((16, 64, 56, 56), "uint4 symmetric"),
    "weight 512x512x3x3, per channel": ((512, 512, 3, 3), "int4 narrow channel:0"),
}


def best(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Best CPU time of each function in seconds, interleaved, after two runs to compile."""
    times = dict.fromkeys(functions, float("inf"))
    for run in range(RUNS + 2):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if run >= 2:
                times[name] = min(times[name], time.process_time() - start)
    return times


def candidates(shape: tuple[int, ...], text: str) -> dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]]:
    """Functions to time, each with what it learns."""
    spec = QuantSpec.parse(text)
    scale = torch.full(spec.param_shape(shape), 3.0 / spec.qmax)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    found: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]] = {}
    for name in METHODS_AND_GOALS:
        method = METHODS.get(name)(spec)
        method.start(scale, zero)
        if name == "AdaRoundFakeQuantize":
            method.init(torch.randn(shape), scale, zero)
        found[name] = (lambda x, m=method: m(x, scale, zero), list(method.parameters()))
    return found | peers(spec, scale, zero)


def measure(shape: tuple[int, ...], text: str) -> dict[str, float]:
    """Times of the clone, and of each candidate forward and both ways."""
    x, g = torch.randn(shape, requires_grad=True), torch.randn(shape)
    runs: dict[str, Callable[[], Any]] = {"clone": lambda: x.detach().clone()}
    for name, (function, learned) in candidates(shape, text).items():

        def forward(f: Callable[[Tensor], Tensor] = function) -> None:
            with torch.no_grad():
                f(x)

        def both(f: Callable[[Tensor], Tensor] = function, p: list[Tensor] = learned) -> None:
            torch.autograd.grad(f(x), [x, *p], g)

        runs[f"{name} forward"], runs[f"{name} both"] = forward, both
    return best(runs)


def main() -> None:
    """Print a table for each case, and how much faster LSQ is than the others."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        large = str(1 << 40)  # glibc reads this at its start: keep freed memory, however large
        reuse = {"MALLOC_MMAP_THRESHOLD_": large, "MALLOC_TRIM_THRESHOLD_": large}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.numerics"], {**os.environ, **reuse})
    torch.set_num_threads(1)
    console = Console(width=130)
    for title, (shape, text) in CASES.items():
        times = measure(shape, text)
        clone = times.pop("clone")
        table = Table(title=f"{title}: times of x.clone() ({clone * 1e3:.2f} ms)")
        for column in ("method", "forward", "goal", "forward + backward", "goal"):
            table.add_column(column)
        for name in dict.fromkeys(n.rpartition(" ")[0] for n in times):
            goals = METHODS_AND_GOALS.get(name, FREE)
            cells = []
            for what, goal in zip(("forward", "both"), goals, strict=True):
                cells += [f"{times[f'{name} {what}'] / clone:.1f}x", "" if goal is None else f"{goal:.0f}x"]
            table.add_row(name, *cells)
        console.print(table)
        for peer, goal in FACTORS.items():
            if f"{peer} both" in times:
                factor = times[f"{peer} both"] / times["LearnableFakeQuantize both"]
                console.print(f"LSQ, both ways, is {factor:.1f} times faster than {peer} (goal {goal:.0f})")
    for line in MISSING:
        console.print(line)


if __name__ == "__main__":
    main()
