"""MinMaxObserver: the range of everything seen.  lo = min(lo, min x),  hi = max(hi, max x)."""

import torch
from torch import Tensor

from bitwright.observers.base import Observer, check_same_kind, min_max, register_observer
from bitwright.spec import QuantSpec


@register_observer("MinMaxObserver", aliases=("minmax", "MINMAX", "max"))
class MinMaxObserver(Observer):
    """Running minimum and maximum; the order of batches does not matter."""

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self.lo: Tensor | None = None
        self.hi: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        """Widen the range to hold ``x``."""
        self._widen(*min_max(x, self.spec))

    def range(self) -> tuple[Tensor, Tensor]:
        """The widest range seen."""
        if self.lo is None or self.hi is None:
            raise RuntimeError("range() before the first observe()")
        return self.lo, self.hi

    def merge(self, other: Observer) -> None:
        """Widen the range to hold what ``other`` has seen."""
        check_same_kind(self, other)
        if isinstance(other, MinMaxObserver) and other.lo is not None and other.hi is not None:
            self._widen(other.lo, other.hi)
            self.param_shape = other.param_shape
            self.batches += other.batches

    def _widen(self, lo: Tensor, hi: Tensor) -> None:
        self.lo = lo if self.lo is None else torch.minimum(self.lo, lo)
        self.hi = hi if self.hi is None else torch.maximum(self.hi, hi)
