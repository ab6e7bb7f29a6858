"""EMAMinMaxObserver: an exponential moving average of each batch's range.  lo = r·lo + (1 - r)·min x.

A moving average has an order: merging appends the other observer's batches to one's own. With its first batch x1 and
its average m after n batches, which gave x1 the weight r**(n - 1) where a later one would have had (1 - r)·r**(n - 1),

    merged = r**n · own + m - r**n · x1
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.base import Observer, check_same_kind, min_max, register_observer
from bitwright.spec import QuantSpec


@register_observer("EMAMinMaxObserver", aliases=("ema_minmax", "moving_average", "MOVING_AVERAGE"))
class EMAMinMaxObserver(Observer):
    """Moving average of minimum and maximum; the first batch is taken as it is.

    Args:
        spec: what the range is for.
        ema_ratio: weight of the past, from 0 (only the last batch) to below 1.
    """

    def __init__(self, spec: QuantSpec, ema_ratio: float = 0.9) -> None:
        super().__init__(spec)
        if not 0.0 <= ema_ratio < 1.0:
            raise ConfigError(f"ema_ratio must be at least 0 and below 1, not {ema_ratio}")
        self.ema_ratio = ema_ratio
        self.lo: Tensor | None = None
        self.hi: Tensor | None = None
        self.first: tuple[Tensor, Tensor] | None = None  # the range of the first batch
        self._last: tuple[int, tuple[Tensor | None, Tensor | None], tuple[Tensor, Tensor]] | None = None

    def observe(self, x: Tensor) -> None:
        """Move the range towards that of ``x``."""
        self.move(*min_max(x, self.spec))

    def move(self, lo: Tensor, hi: Tensor) -> None:
        """Move the range towards [lo, hi]; what a shared quantizer sees in one batch counts once, as a whole."""
        if self.batch is not None and self._last is not None and self._last[0] == self.batch:
            _, (self.lo, self.hi), (lowest, highest) = self._last
            lo, hi = torch.minimum(lo, lowest), torch.maximum(hi, highest)
            self.batches -= 1
        if self.batch is not None:
            self._last = (self.batch, (self.lo, self.hi), (lo, hi))
        if self.lo is None or self.hi is None:
            self.lo, self.hi = self.first = lo, hi
            return
        self.lo = self.lo * self.ema_ratio + lo * (1 - self.ema_ratio)
        self.hi = self.hi * self.ema_ratio + hi * (1 - self.ema_ratio)

    def range(self) -> tuple[Tensor, Tensor]:
        """The averaged range."""
        if self.lo is None or self.hi is None:
            raise RuntimeError("range() before the first observe()")
        return self.lo, self.hi

    def merge(self, other: Observer) -> None:
        """Go on with the batches of ``other``, as if they had been seen here after one's own."""
        check_same_kind(self, other)
        if not isinstance(other, EMAMinMaxObserver) or other.lo is None or other.hi is None or other.first is None:
            return
        if self.lo is None or self.hi is None:
            self.lo, self.hi, self.first = other.lo, other.hi, other.first
        else:
            past = self.ema_ratio**other.batches
            self.lo = other.lo + (self.lo - other.first[0]) * past
            self.hi = other.hi + (self.hi - other.first[1]) * past
        self.param_shape = other.param_shape
        self.batches += other.batches
