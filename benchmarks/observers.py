"""What observers cost, as a ratio to ``x.aminmax()``: ``make bench BENCH=observers``."""

import math
import time
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bitwright.observers import OBSERVERS
from bitwright.spec import QuantSpec

COUNT = 10_000_000
GOALS = {
    "MinMaxObserver": 1.2,
    "EMAMinMaxObserver": 1.2,
    "HistogramObserver": 10,
    "PercentileObserver": 10,
    "EMAQuantileObserver": 10,
    "MinMaxFloorObserver": 10,
    "PoTModeObserver": 10,
    "MSEObserver": 15,
    "EMAMSEObserver": 15,
    "KLObserver": 15,
}


def ratio(function: Callable[[], object], unit: Callable[[], object], runs: int) -> float:
    """Best CPU time of ``function`` in units of the best of ``unit``, interleaved, one thread."""
    times = [math.inf, math.inf]
    for _ in range(runs):
        for i, call in enumerate((unit, function, unit)):
            start = time.thread_time()
            call()
            times[i % 2] = min(times[i % 2], time.thread_time() - start)
    return times[1] / times[0]


def observe(name: str, spec: QuantSpec, x: Tensor) -> None:
    """One batch and the answer, search included."""
    observer = OBSERVERS.get(name)(spec)
    observer(x)
    observer.qparams()


def naive_mse(x: Tensor) -> float:
    """95 shrunken ranges, each tried on the whole tensor, as earlier toolkits do."""
    top, best = float(x.abs().max()), (math.inf, 0.0)
    for i in range(95):
        scale = top * (1 - 0.01 * i) / 127
        error = float(((x / scale).round().clamp(-128, 127) * scale - x).square().mean())
        best = min(best, (error, scale))
    return best[1]


def naive_entropy(x: Tensor) -> int:
    """The entropy search over 2048 bins with a loop over thresholds and levels, as earlier toolkits do."""
    counts = torch.histc(x.abs(), 2048).double()
    best = (math.inf, 0)
    for held in range(128, 2049, 16):  # a sixteenth of the thresholds: it is slow enough
        reference = counts[:held].clone()
        reference[-1] += counts[held:].sum()
        candidate = torch.zeros(held, dtype=torch.float64)
        for part in torch.arange(held).tensor_split(128):
            filled = counts[part] > 0
            candidate[part] = filled * counts[part].sum() / filled.sum().clamp(min=1)
        p, q = reference / reference.sum(), candidate / candidate.sum()
        best = min(best, (float(torch.where(p > 0, p * (p / q.clamp(min=1e-12)).log(), 0.0).sum()), held))
    return best[1]


def torch_histogram(x: Tensor) -> object:
    """PyTorch's own HistogramObserver on one batch; None if torch no longer has it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.ao.quantization.observer import HistogramObserver  # noqa: TID251 - measured here, not used

            observer = HistogramObserver()
            observer(x)
            return observer.calculate_qparams()
    except ImportError:
        return None


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    flat = torch.randn(COUNT, generator=g)
    convolution = flat[: 512 * 4608].view(512, 4608)
    activation = flat[: 32 * 64 * 56 * 56].view(32, 64, 56, 56)
    cases: dict[str, tuple[str, Tensor, int]] = {  # title: spec, data, runs
        "int8 tensor": ("int8", flat, 7),
        "uint8 tensor": ("uint8", flat, 5),
        "int8 channel 512x4608": ("int8 channel:0", convolution, 3),
        "int4 channel 512x4608": ("int4 channel:0", convolution, 3),
        "int8 channel 1000x10000": ("int8 channel:0", flat.view(1000, 10_000), 2),
        "uint8 channel 32x64x56x56": ("uint8 channel:1", activation.relu(), 2),
        "int4 group:128 512x4608": ("int4 group:128:1", convolution, 2),
        "uint4 group:128 512x4608": ("uint4 group:128:1", convolution, 1),
    }
    table = Table(title=f"Observers, {COUNT:,} values per tensor, one batch and the answer, in units of x.aminmax()")
    for column in ("", *cases, "goal (tensor)"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=not column)
    for name in OBSERVERS.names("*Observer"):
        row = []
        for text, x, runs in cases.values():
            spec = QuantSpec.parse(text)
            times = ratio(lambda n=name, s=spec, x=x: observe(n, s, x), lambda x=x: x.aminmax(), runs)
            row.append(f"{times:.1f}")
        table.add_row(name, *row, f"{GOALS[name]}" if name in GOALS else "")
    others: dict[str, tuple[Callable[[], object], int]] = {
        "torch HistogramObserver": (lambda: torch_histogram(flat), 1),
        "torch.histc, 2048 bins": (lambda: torch.histc(flat, 2048), 3),
        "kthvalue (percentile)": (lambda: flat.kthvalue(COUNT - 1000), 2),
        "naive MSE, 95 passes": (lambda: naive_mse(flat), 1),
        "naive entropy, every 16th threshold": (lambda: naive_entropy(flat), 1),
    }
    for name, (function, runs) in others.items():
        times = ratio(function, lambda: flat.aminmax(), runs)
        table.add_row(name, f"{times:.1f}", *([""] * len(cases)), style="dim")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
