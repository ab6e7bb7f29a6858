"""Seconds and peak memory of a step of this process."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.zoo.row import Step

T = TypeVar("T")


def resident_megabytes(pid: int | str = "self", key: str = "VmRSS") -> float:
    """Resident memory of a process, now or (``VmHWM``) at its peak; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:")), 0.0)


def cpu_seconds(pid: int) -> float:
    """Seconds that a process has computed; 0 where the system does not tell."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def computed() -> float:
    """Seconds that this process and its children have computed: runtimes may run in a child."""
    ended = os.times()
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return (
        time.process_time() + ended.children_user + ended.children_system + sum(cpu_seconds(int(p)) for p in children)
    )


class Meter:
    """Measures steps, memory counted from when the meter was made."""

    def __init__(self) -> None:
        self._before = resident_megabytes()

    def measure(self, work: Callable[[], T]) -> tuple[T, Step]:
        """Do the work, and say what it cost."""
        gc.collect()
        _forget_peak()
        start, computing = time.perf_counter(), computed()
        result = work()
        seconds, cpu = time.perf_counter() - start, computed() - computing
        return result, Step(round(seconds, 3), round(cpu, 3), round(resident_megabytes(key="VmHWM") - self._before, 1))


def _forget_peak() -> None:
    """Let the kernel count the peak of this process from here; elsewhere than on Linux it is not known."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
