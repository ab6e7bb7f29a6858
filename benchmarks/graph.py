"""What each stage of prepare costs for nets of 50 to 5,000 nodes, next to plain tracing: ``make bench BENCH=graph``."""

import argparse
import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn

import bitwright as bw

SIZES = (50, 200, 500, 1000, 2000, 5000)
STAGES = ("capture", "simplify", "decide", "swap", "fuse", "place")
GOAL = 5.0


class Block(nn.Module):
    """Four nodes: a convolution, its BatchNorm, a ReLU and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.norm(self.conv(x))) + x


class Chain(nn.Module):
    """Blocks in a row."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(nodes // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Watch:
    """Adds up the time spent in functions of ``bitwright.preparation``, by stage."""

    def __init__(self) -> None:
        self.times: dict[str, float] = defaultdict(float)

    def watched(self, function: Callable[..., Any], stage: str | None = None) -> Callable[..., Any]:
        """The function, timed; without a stage its second argument names it."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.times[stage or args[1]] += time.process_time() - start

        return timed

    def prepare(self, model: nn.Module, example: torch.Tensor) -> dict[str, float]:
        """Prepare, and return the seconds of each stage and of the whole."""
        self.times.clear()
        home = importlib.import_module("bitwright.preparation.pipeline")
        own = {name: getattr(home, name) for name in ("capture_model", "decide", "swap", "place", "run_stage")}
        try:
            for name, function in own.items():
                setattr(
                    home, name, self.watched(function, None if name == "run_stage" else name.removesuffix("_model"))
                )
            start = time.process_time()
            bw.prepare(model, example)
            return {**self.times, "whole": time.process_time() - start}
        finally:
            for name, function in own.items():
                setattr(home, name, function)


def trace_seconds(model: nn.Module) -> float:
    """Seconds of plain tracing."""
    start = time.process_time()
    fx.symbolic_trace(model)
    return time.process_time() - start


def main() -> None:
    """Print a line for each size, and whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    table = Table(title="prepare against torch.fx.symbolic_trace (processor time, one thread, best of several)")
    for column in ("nodes", "trace", "prepare", "ratio", "per node", *STAGES, "rest"):
        table.add_column(column, justify="right")
    watch, example, ratios, per_node = Watch(), torch.randn(1, 4, 4, 4), [], []
    watch.prepare(Chain(8).eval(), example)
    for nodes in SIZES:
        model = Chain(nodes).eval()
        trace, times = float("inf"), {"whole": float("inf")}
        for _ in range(runs):
            trace = min(trace, trace_seconds(model))
            times = min(times, watch.prepare(model, example), key=lambda t: t["whole"])
        whole = times["whole"]
        shares = [times.get(stage, 0.0) / whole for stage in STAGES]
        ratios.append(whole / trace)
        per_node.append(whole / nodes)
        cells = [f"{share:.0%}" for share in (*shares, 1 - sum(shares))]
        row = (str(nodes), f"{trace * 1e3:.0f} ms", f"{whole * 1e3:.0f} ms", f"{ratios[-1]:.2f}x")
        table.add_row(*row, f"{per_node[-1] * 1e6:.0f} us", *cells)
    console = Console(width=140)
    console.print(table)
    growth = per_node[-1] / min(per_node)
    console.print(f"largest ratio {max(ratios):.2f}x (goal {GOAL:.0f}x); time per node grows by {growth:.2f}x")


if __name__ == "__main__":
    main()
