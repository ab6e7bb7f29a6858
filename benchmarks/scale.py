"""What save, load, prepare and calibrate cost next to plain torch, in time and memory: ``make bench BENCH=scale``.

Each step runs in the same process, one after the other, on a model of random weights. Peak memory is what the process
grew by at most while the step ran, as a multiple of the size of the model's parameters; Linux tells it. Pages of files,
which the system can take back at any time, do not count. *Mapped* steps have weights mapped from safetensors.
"""

import argparse
import copy
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

import bitwright as bw
from bitwright.distributed import rank, under_torchrun, world_size

WIDTH = 1024
BATCHES = 4


class Block(nn.Module):
    """A transformer's feed-forward part, with what stands around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(millions: float) -> nn.Module:
    """A row of blocks with about this many parameters."""
    count = max(1, round(millions * 1e6 / (8 * WIDTH * WIDTH)))
    return nn.Sequential(*(Block() for _ in range(count)))


def _without_memory(millions: float) -> nn.Module:
    with torch.device("meta"):
        return build(millions).eval()


def _held() -> int:
    """Bytes of memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Peak:
    """The most memory of its own that the process had, looked at a few hundred times a second."""

    def __enter__(self) -> "Peak":
        self._before = self._most = _held()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self._most = max(self._most, _held())

    def __exit__(self, *_: object) -> None:
        self._most = max(self._most, _held())
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        """Bytes more than at first."""
        return self._most - self._before


class Meter:
    """Time and growth of the steps of one run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.growth: dict[str, int] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure what happens inside."""
        with Peak() as peak:
            start = time.perf_counter()
            yield
            self.seconds[name] = time.perf_counter() - start
        self.growth[name] = peak.growth


def measure(millions: float) -> tuple[Meter, int]:
    """Run every step once; return what it took, and the bytes of the parameters."""
    torch.manual_seed(0)
    model, meter = build(millions).eval(), Meter()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    batches = [torch.randn(16, WIDTH) for _ in range(BATCHES)]
    folder = Path(tempfile.mkdtemp())
    steps: list[tuple[str, Callable[[], object]]] = []
    kept: dict[str, nn.Module] = {}

    def prepare() -> None:
        kept["qmodel"] = bw.prepare(model, batches[0])

    def reload() -> None:
        kept["loaded"] = bw.load(folder / "saved", model)

    def prepare_mapped() -> None:
        kept["mapped"] = bw.prepare(bw.map_weights(_without_memory(millions), folder / "plain.safetensors"), batches[0])

    def reload_mapped() -> None:
        kept["loaded mapped"] = bw.load(folder / "saved mapped", lambda: _without_memory(millions))

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    steps += [
        ("deepcopy", lambda: copy.deepcopy(model)),
        ("prepare", prepare),
        ("forward", forward),
        ("calibrate", lambda: bw.calibrate(kept["qmodel"], batches)),
        ("safetensors save", lambda: save_file(model.state_dict(), folder / "plain.safetensors")),
        ("save", lambda: bw.save(kept["qmodel"], folder / "saved")),
        ("safetensors load", lambda: model.load_state_dict(load_file(folder / "plain.safetensors"))),
        ("load", reload),
        ("prepare mapped", prepare_mapped),
        ("calibrate by block", lambda: bw.calibrate_by_block(kept["mapped"], batches)),
        ("save mapped", lambda: bw.save(kept["mapped"], folder / "saved mapped")),
        ("load mapped", reload_mapped),
    ]
    forward()  # warm up
    for name, step in steps:
        with meter.step(name):
            step()
    with torch.no_grad():
        for name in ("loaded", "loaded mapped"):
            if not torch.equal(kept["qmodel"](batches[0]), kept[name](batches[0])):
                raise SystemExit(f"the {name} model computes something else than the saved one")
    shutil.rmtree(folder)
    return meter, size


def measure_mapped(millions: float) -> tuple[Meter, int]:
    """Run only the steps whose weights stay in files, which are written block by block."""
    torch.manual_seed(0)
    empty, meter = _without_memory(millions), Meter()
    batches = [torch.randn(16, WIDTH) for _ in range(BATCHES)]
    folder = Path(tempfile.mkdtemp())
    kept: dict[str, nn.Module] = {}
    (folder / "plain").mkdir()
    for name, _ in empty.named_children():
        state = {f"{name}.{key}": tensor for key, tensor in Block().state_dict().items()}
        save_file(state, folder / "plain" / f"{name}.safetensors")

    def prepare() -> None:
        kept["mapped"] = bw.prepare(bw.map_weights(empty, folder / "plain"), batches[0])

    def reload() -> None:
        kept["loaded"] = bw.load(folder / "saved", lambda: _without_memory(millions))

    for name, step in (
        ("prepare mapped", prepare),
        ("calibrate by block", lambda: bw.calibrate_by_block(kept["mapped"], batches)),
        ("save mapped", lambda: bw.save(kept["mapped"], folder / "saved")),
        ("load mapped", reload),
    ):
        with meter.step(name):
            step()
    shutil.rmtree(folder)
    return meter, sum(p.numel() * p.element_size() for p in empty.parameters())


PAIRS = {
    "prepare": "deepcopy",
    "calibrate": "forward",
    "save": "safetensors save",
    "load": "safetensors load",
    "prepare mapped": "deepcopy",
    "calibrate by block": "forward",
    "save mapped": "safetensors save",
    "load mapped": "safetensors load",
}


def calibrate_share(millions: float, batches: int) -> float:
    """Seconds to calibrate a rank's share; all ranks together have this many batches."""
    torch.manual_seed(0)
    with under_torchrun():
        data = [torch.randn(256, WIDTH) for _ in range(batches)]
        model = bw.prepare(build(millions).eval(), data[0])
        start = time.perf_counter()
        bw.calibrate(model, data[rank() :: world_size()])
        return time.perf_counter() - start


def ranks_against_one(millions: float = 25.0, batches: int = 64) -> None:
    """Print how long calibration takes on two ranks, of one thread each, and on one."""
    seconds = {}
    for ranks in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port=29731"]
        command += ["-m", "benchmarks.scale", "--share", str(millions), str(batches)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        seconds[ranks] = max(map(float, done.stdout.split()))
    ratio = seconds[1] / seconds[2]
    Console().print(
        f"calibration on 1 rank {seconds[1]:.2f} s, on 2 ranks {seconds[2]:.2f} s: {ratio:.2f} times as fast"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, nargs="*", default=[100.0], help="parameters")
    parser.add_argument("--mapped", action="store_true", help="only steps whose weights stay in files")
    parser.add_argument("--share", type=float, nargs=2, help="only what one rank of the last measurement does")
    given = parser.parse_args()
    if given.share:
        print(calibrate_share(given.share[0], int(given.share[1])))
        return
    if not given.mapped:
        ranks_against_one()
    for millions in given.millions:
        meter, size = measure_mapped(millions) if given.mapped else measure(millions)
        table = Table(title=f"{size / 4e6:.0f} million parameters ({size / 2**20:.0f} MiB)")
        for name in ("step", "time", "peak", "peak / parameters", "beside", "ratio of times", "its peak"):
            table.add_column(name, justify="left" if name in ("step", "beside") else "right")
        for name in [name for name in PAIRS if name in meter.seconds]:
            table.add_row(name, f"{meter.seconds[name]:.2f} s", *_peak(meter, name, size), *_beside(meter, name, size))
        Console().print(table)


def _peak(meter: Meter, name: str, size: int) -> tuple[str, str]:
    return f"{meter.growth[name] / 2**20:.0f} MiB", f"{meter.growth[name] / size:.2f}"


def _beside(meter: Meter, name: str, size: int) -> tuple[str, ...]:
    """What plain torch takes for the same, if it was measured."""
    other = PAIRS[name]
    if other not in meter.seconds:
        return ()
    return other, f"{meter.seconds[name] / meter.seconds[other]:.1f}", _peak(meter, other, size)[1]


if __name__ == "__main__":
    main()
