"""Temporarily switch off quantizers: the float model is the quantized one without them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from bitwright.quantizer import Mode, TensorQuantizer


@contextmanager
def switched_off(quantizers: Iterable[TensorQuantizer]) -> Iterator[None]:
    """Pass tensors unchanged, then restore each quantizer's mode."""
    modes = [(quantizer, quantizer.mode) for quantizer in quantizers]
    for quantizer, _ in modes:
        quantizer.mode = Mode.OFF
    try:
        yield
    finally:
        for quantizer, mode in modes:
            quantizer.mode = mode
