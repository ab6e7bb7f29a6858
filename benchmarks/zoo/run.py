"""Runs each family in its own process, so that a crash, a hang or a memory hog costs one row, not the run."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.zoo.families import Family
from benchmarks.zoo.meter import cpu_seconds, resident_megabytes
from benchmarks.zoo.row import DONE, Row, read_row, row_path

ROOT = Path(__file__).parents[2]
BACKENDS = ("onnxruntime", "openvino")
COMMAND = (sys.executable, "-m", "benchmarks.zoo.measure")


@dataclass(frozen=True)
class Limits:
    """What one process may use.

    Attributes:
        seconds: computing time of one step.
        megabytes: memory.
    """

    seconds: float
    megabytes: float


def run_family(family: Family, backends: Sequence[str], folder: Path, libraries: Path, limits: Limits) -> list[Row]:
    """The rows of a family for some backends, measured unless they are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    while missing := [b for b in backends if not _finished(read_row(row_path(folder, family.name, b)))]:
        for backend in missing:
            row_path(folder, family.name, backend).unlink(missing_ok=True)
        end = _run(family.name, folder, missing, libraries, limits)
        _note_end(family, folder, missing, end)
    rows = [read_row(row_path(folder, family.name, b)) for b in backends]
    return [row for row in rows if row is not None]


def _finished(row: Row | None) -> bool:
    return row is not None and (row.step == DONE or bool(row.error))


def _note_end(family: Family, folder: Path, backends: list[str], end: str) -> None:
    """Write what ended the process into the row it was measuring; another process measures the rows after it."""
    for backend in backends:
        row = read_row(row_path(folder, family.name, backend))
        if _finished(row):
            continue
        row = row or Row(family.name, family.library, family.kind, backend)
        row.error = end
        row.write(folder)
        return


def _run(name: str, folder: Path, backends: list[str], libraries: Path, limits: Limits) -> str:
    """Run a process until it ends, and return why it ended."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(libraries)])
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*COMMAND, name, str(folder), *backends]
    errors = folder / f"{name}.stderr"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
        try:
            killed = _watch(process, folder, limits)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    last = (errors.read_text(errors="replace").strip().splitlines() or [""])[-1]
    if killed:
        return killed
    if process.returncode < 0:
        return f"the process died of {signal.Signals(-process.returncode).name}; it last said: {last[:300]}"
    return f"the process ended with {process.returncode}; it last said: {last[:300]}"


def _watch(process: subprocess.Popen[bytes], folder: Path, limits: Limits) -> str:
    """Wait for a process; end it where it goes beyond the limits, and say which."""
    newest, begun = 0.0, 0.0
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
            return ""
        if resident_megabytes(process.pid) > limits.megabytes:
            process.kill()
            return f"more than {limits.megabytes:,.0f} MB of memory"
        written = max((p.stat().st_mtime for p in folder.glob("*.json")), default=0.0)
        computed = cpu_seconds(process.pid)
        if written > newest:
            newest, begun = written, computed
        if computed - begun > limits.seconds:
            process.kill()
            return f"more than {limits.seconds:,.0f} s in one step"
