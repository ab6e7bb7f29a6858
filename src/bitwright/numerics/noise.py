"""Random numbers that a kernel makes for itself from the place of a value and a key: none are stored.

A hash of the place, in whole numbers of 32 bits that may overflow, takes the time of a few multiplications, and eager
and compiled kernels get the same numbers. The key comes from torch's generator, so that ``torch.manual_seed`` and
checkpointing have their say, or from that of ``drawing_from``; the gradient makes the numbers of the values again from
the same key.
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
    """Let this thread draw keys from a generator of its own, on the CPU; torch's stays as it is."""
    before = getattr(_here, "generator", None)
    _here.generator = generator
    try:
        yield
    finally:
        _here.generator = before


def draw_key(x: Tensor) -> Tensor:
    """Two random numbers on the device of ``x``: a stream of noise of their own."""
    generator = None if is_traced(x) else getattr(_here, "generator", None)
    if generator is not None:
        return torch.randint(0, 2**31 - 1, (2,), dtype=torch.int32, generator=generator).to(x.device)
    return torch.randint(0, 2**31 - 1, (2,), dtype=torch.int32, device=x.device)


def noise(values: Tensor, key: Tensor) -> Tensor:
    """A number for each value, uniform in (-½, ½), the middles of 2²⁴ equal steps."""
    place = torch.arange(values.numel(), dtype=torch.int32, device=values.device).view(values.shape)
    # In place: the eager path is bound by memory. Shifts keep the sign, so that only the upper bits are good.
    mixed = place.bitwise_xor_(key[0]).mul_(0x70DA3EBB)
    mixed = mixed.bitwise_xor_(mixed >> 15).add_(key[1]).mul_(0x5F7E31B5)
    mixed = mixed.bitwise_xor_(mixed >> 13).mul_(0x5CFB0CF9)
    return (mixed >> 8).to(values.dtype).mul_(2.0**-24).add_(2.0**-25)
