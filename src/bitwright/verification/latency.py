"""Latency: the file against the same network in FP32, in one runtime, on one thread, runs interleaved."""

import time
from collections.abc import Mapping

import numpy as np

from bitwright.errors import VerifyError
from bitwright.exporting import LoadedFile
from bitwright.verification.proof import Latency
from bitwright.verification.runtimes.base import Runtime, Session

_RUNS, _WARM_UP = 15, 3


def measure_latency(runtime: Runtime, file: LoadedFile, twin: LoadedFile, batch: Mapping[str, np.ndarray]) -> Latency:
    """Time the best of several runs on the first sample, or on the batch if the file does not take one sample."""
    files = (file, twin)
    sessions = [runtime.open(f, threads=1) for f in files]
    precision = runtime.default_precision()
    if precision:
        sessions += [runtime.open(f, threads=1, as_is=True) for f in files]
    feeds: Mapping[str, np.ndarray] = {name: value[:1] if value.ndim else value for name, value in batch.items()}
    try:
        sessions[0](feeds)
    except VerifyError:  # a file with a fixed batch size
        feeds = batch
    best = [float("inf")] * len(sessions)
    for run in range(_WARM_UP + _RUNS):
        for i, session in enumerate(sessions):
            elapsed = _seconds(session, feeds)
            if run >= _WARM_UP:
                best[i] = min(best[i], elapsed)
    times = [b * 1e3 for b in best]
    count = next((a.shape[0] for a in feeds.values() if a.ndim), 1)
    default = times[2:] or [None, None]
    return Latency(times[0], times[1], count, precision, *default)


def _seconds(session: Session, feeds: Mapping[str, np.ndarray]) -> float:
    start = time.perf_counter()
    session(feeds)
    return time.perf_counter() - start
