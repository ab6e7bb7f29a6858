"""MinMaxObserver: the range of everything seen.  lo = min(lo, min x),  hi = max(hi, max x)."""

from typing import Self

import torch
from torch import Tensor

from bitwright.observers.base import Observer, min_max, register_observer
from bitwright.spec import QuantSpec


@register_observer("MinMaxObserver", aliases=("minmax", "MINMAX", "max"))
class MinMaxObserver(Observer):
    """Running minimum and maximum; the order of batches does not matter."""

    kept = ("lo", "hi")

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self.lo: Tensor | None = None
        self.hi: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        self.widen(*min_max(x, self.spec))

    def range(self) -> tuple[Tensor, Tensor]:
        if self.lo is None or self.hi is None:
            raise RuntimeError("range() before the first observe()")
        return self.lo, self.hi

    def absorb(self, other: Self) -> None:
        self.widen(*MinMaxObserver.range(other))

    def widen(self, lo: Tensor, hi: Tensor) -> None:
        """Widen the range to hold [lo, hi]."""
        self.lo = lo if self.lo is None else torch.minimum(self.lo, lo)
        self.hi = hi if self.hi is None else torch.maximum(self.hi, hi)
