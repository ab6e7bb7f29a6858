"""EMAMinMaxObserver: an exponential moving average of each batch's range.  lo = r·lo + (1 - r)·min x.

A moving average depends on order: merging appends the other observer's batches to this one's. With its first batch x1
and its average m after n batches, which gave x1 the weight r**(n - 1) where a later one would have had (1 - r)·r**(n -
1),

    merged = r**n · own + m - r**n · x1
"""

from typing import Self

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.base import min_max, register_observer
from bitwright.observers.minmax import MinMaxObserver
from bitwright.spec import QuantSpec


@register_observer("EMAMinMaxObserver", aliases=("ema_minmax", "moving_average", "MOVING_AVERAGE"))
class EMAMinMaxObserver(MinMaxObserver):
    """Moving average of minimum and maximum; the first batch is taken as it is.

    Args:
        ema_ratio: weight of the past, from 0 (only the last batch) to below 1.
    """

    kept = ("lo", "hi", "first_lo", "first_hi")

    def __init__(self, spec: QuantSpec, ema_ratio: float = 0.9) -> None:
        super().__init__(spec)
        if not 0.0 <= ema_ratio < 1.0:
            raise ConfigError(f"ema_ratio must be at least 0 and below 1, not {ema_ratio}")
        self.ema_ratio = ema_ratio
        self.first_lo = self.first_hi = torch.empty(0)  # the range of the first batch
        self._last: tuple[int, tuple[Tensor | None, Tensor | None], tuple[Tensor, Tensor]] | None = None

    def observe(self, x: Tensor) -> None:
        self.move(*min_max(x, self.spec))

    def move(self, lo: Tensor, hi: Tensor) -> None:
        """Move the range towards [lo, hi]; all that a shared quantizer sees in one batch counts once."""
        if self.batch is not None and self._last is not None and self._last[0] == self.batch:
            _, (self.lo, self.hi), (lowest, highest) = self._last
            lo, hi = torch.minimum(lo, lowest), torch.maximum(hi, highest)
            self.batches -= 1
        if self.batch is not None:
            self._last = (self.batch, (self.lo, self.hi), (lo, hi))
        if self.lo is None or self.hi is None:
            self.lo, self.hi = self.first_lo, self.first_hi = lo, hi
            return
        self.lo = self.lo * self.ema_ratio + lo * (1 - self.ema_ratio)
        self.hi = self.hi * self.ema_ratio + hi * (1 - self.ema_ratio)

    def absorb(self, other: Self) -> None:
        lo, hi = other.range()
        if self.lo is None or self.hi is None:
            self.lo, self.hi, self.first_lo, self.first_hi = lo, hi, other.first_lo, other.first_hi
            return
        past = self.ema_ratio**other.batches
        self.lo = lo + (self.lo - other.first_lo) * past
        self.hi = hi + (self.hi - other.first_hi) * past
