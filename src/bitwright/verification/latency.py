"""Latency and memory: the file against the same network in FP32, in one runtime, on one thread, runs interleaved."""

from collections.abc import Mapping

import numpy as np

from bitwright.errors import VerifyError
from bitwright.exporting import LoadedFile
from bitwright.verification.isolation.child import RuntimeDied
from bitwright.verification.proof import Latency, Memory, RuntimeProof
from bitwright.verification.runtimes.base import Runtime


def measure_latency(runtime: Runtime, file: LoadedFile, twin: LoadedFile, batch: Mapping[str, np.ndarray]) -> Latency:
    """Time the best of several runs on the first sample, or on the batch if the file does not accept one sample."""
    feeds: Mapping[str, np.ndarray] = {name: value[:1] if value.ndim else value for name, value in batch.items()}
    try:
        times = runtime.race([file, twin], feeds)
    except RuntimeDied:
        raise
    except VerifyError:  # a file with a fixed batch size
        feeds = batch
        times = runtime.race([file, twin], feeds)
    quantized, plain = (seconds * 1e3 for seconds in times)
    count = next((a.shape[0] for a in feeds.values() if a.ndim), 1)
    found = Latency(quantized, plain, count, runtime.default_precision())
    if found.default_precision:
        _time_as_is(found, runtime, [file, twin], feeds)
    return found


def _time_as_is(found: Latency, runtime: Runtime, files: list[LoadedFile], feeds: Mapping[str, np.ndarray]) -> None:
    try:
        times = runtime.race(files, feeds, as_is=True)
        found.default_quantized_ms, found.default_float_ms = (seconds * 1e3 for seconds in times)
    except VerifyError as error:  # this does not invalidate the measurements in float32
        found.default_problem = str(error)


def measure_memory(
    runtime: Runtime, file: LoadedFile, twin: LoadedFile, batch: Mapping[str, np.ndarray], count: int
) -> Memory | None:
    """The peak memory on the first samples; None where it cannot be measured."""
    feeds = {name: value[:count] if value.ndim else value for name, value in batch.items()}
    try:
        taken = [runtime.peak_memory(f, feeds) for f in (file, twin)]
    except VerifyError:  # this does not invalidate the measurements of values and speed
        return None
    return Memory(*taken) if None not in taken else None  # pyrefly: ignore


def add_float_times(proof: RuntimeProof, runtime: Runtime, twin: LoadedFile, feeds: Mapping[str, np.ndarray]) -> None:
    """Time the float network operator by operator, beside the integer ones."""
    executed = runtime.profile(twin, feeds)
    if not any(e.microseconds for e in executed):  # it does not time operators
        return
    owners = {node: i for i, e in enumerate(executed) if e.role == "compute" for node in e.nodes}
    for check in proof.operators:
        twins = {owners[node] for node in check.nodes if node in owners}
        if twins:
            check.float_microseconds = sum(executed[i].microseconds for i in twins)
