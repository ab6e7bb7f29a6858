"""Random numbers that a kernel computes from a value's position and a key, so none are stored.

Hashing the position in 32-bit integers that may overflow costs a few multiplications, and gives eager and compiled
kernels the same numbers. The key comes from torch's generator, so ``torch.manual_seed`` and checkpointing apply, or
from the one passed to ``drawing_from``. The gradient recomputes the same numbers from the same key.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bitwright.torch_internals import is_traced

_here = threading.local()


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Draw this thread's keys from the given CPU generator; torch's own is left alone."""
    before = getattr(_here, "generator", None)
    _here.generator = generator
    try:
        yield
    finally:
        _here.generator = before


def draw_key(x: Tensor) -> Tensor:
    """Draw two random numbers on the device of ``x``: the key of a new stream of noise."""
    generator = None if is_traced(x) else getattr(_here, "generator", None)
    if generator is not None:
        return torch.randint(0, 2**31 - 1, (2,), dtype=torch.int32, generator=generator).to(x.device)
    return torch.randint(0, 2**31 - 1, (2,), dtype=torch.int32, device=x.device)


def noise(values: Tensor, key: Tensor) -> Tensor:
    """A number for each value, uniform in (-½, ½), the middles of 2²⁴ equal steps."""
    place = torch.arange(values.numel(), dtype=torch.int32, device=values.device).view(values.shape)
    # In place: the eager path is bound by memory. Shifts keep the sign, so only the upper bits are random enough.
    mixed = place.bitwise_xor_(key[0]).mul_(0x70DA3EBB)
    mixed = mixed.bitwise_xor_(mixed >> 15).add_(key[1]).mul_(0x5F7E31B5)
    mixed = mixed.bitwise_xor_(mixed >> 13).mul_(0x5CFB0CF9)
    return (mixed >> 8).to(values.dtype).mul_(2.0**-24).add_(2.0**-25)
