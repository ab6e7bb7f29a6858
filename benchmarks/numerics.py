"""What methods cost, in units of ``x.clone()``, beside torch's own operators: ``make bench BENCH=numerics``."""

import os
import time
from collections.abc import Callable
from typing import Any

os.environ["BITWRIGHT_COMPILE"] = "1"

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bitwright.methods import METHODS
from bitwright.spec import QuantSpec

RUNS = 25
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
CASES = {
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
    learned, place = scale.reshape(-1).clone().requires_grad_(), zero.reshape(-1).float().requires_grad_()
    ends = (spec.qmin, spec.qmax)
    if scale.ndim:
        found["torch.fake_quantize"] = (
            lambda x: torch.fake_quantize_per_channel_affine(x, scale, zero, 0, *ends),
            [],
        )
        found["torch learnable (C++)"] = (
            lambda x: torch._fake_quantize_learnable_per_channel_affine(x, learned, place, 0, *ends, 1.0),
            [learned, place],
        )
    else:
        found["torch.fake_quantize"] = (
            lambda x: torch.fake_quantize_per_tensor_affine(x, float(scale), 0, *ends),
            [],
        )
        found["torch learnable (C++)"] = (
            lambda x: torch._fake_quantize_learnable_per_tensor_affine(x, learned, place, *ends, 1.0),
            [learned, place],
        )
    return found


def main() -> None:
    """Print a table for each case."""
    torch.set_num_threads(1)
    for title, (shape, text) in CASES.items():
        x, g = torch.randn(shape, requires_grad=True), torch.randn(shape)
        runs: dict[str, Callable[[], Any]] = {"clone": lambda x=x: x.detach().clone()}
        for name, (function, learned) in candidates(shape, text).items():

            def forward(f: Callable[[Tensor], Tensor] = function, x: Tensor = x) -> None:
                with torch.no_grad():
                    f(x)

            def both(
                f: Callable[[Tensor], Tensor] = function, x: Tensor = x, g: Tensor = g, p: list[Tensor] = learned
            ) -> None:
                torch.autograd.grad(f(x), [x, *p], g)

            runs[f"{name} forward"], runs[f"{name} both"] = forward, both
        times = best(runs)
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
        Console(width=130).print(table)


if __name__ == "__main__":
    main()
