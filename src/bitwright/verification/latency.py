"""Latency: the file against the same network in FP32, in one runtime, on one thread, runs interleaved."""

from collections.abc import Mapping

import numpy as np

from bitwright.errors import VerifyError
from bitwright.exporting import LoadedFile
from bitwright.verification.isolation.child import RuntimeDied
from bitwright.verification.proof import Latency
from bitwright.verification.runtimes.base import Runtime


def measure_latency(runtime: Runtime, file: LoadedFile, twin: LoadedFile, batch: Mapping[str, np.ndarray]) -> Latency:
    """Time the best of several runs on the first sample, or on the batch if the file does not take one sample."""
    feeds: Mapping[str, np.ndarray] = {name: value[:1] if value.ndim else value for name, value in batch.items()}
    try:
        times = runtime.race([file, twin], feeds)
    except RuntimeDied:
        raise
    except VerifyError:  # a file with a fixed batch size
        feeds = batch
        times = runtime.race([file, twin], feeds)
    precision = runtime.default_precision()
    default = runtime.race([file, twin], feeds, as_is=True) if precision else []
    quantized, plain = (seconds * 1e3 for seconds in times)
    count = next((a.shape[0] for a in feeds.values() if a.ndim), 1)
    by_default = [seconds * 1e3 for seconds in default] or [None, None]
    return Latency(quantized, plain, count, precision, *by_default)
