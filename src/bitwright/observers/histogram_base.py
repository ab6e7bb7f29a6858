"""HistogramBase: the base of observers that read their range off a streaming histogram."""

from abc import abstractmethod
from typing import Self

from torch import Tensor

from bitwright.observers.base import Observer
from bitwright.observers.state.rows import as_rows
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec


class HistogramBase(Observer):
    """Counts all values; subclasses write ``search``, which finds the range of each channel.

    Args:
        bins: bins per channel, a power of two.
    """

    kept = tuple(f"histogram.{name}" for name in ("lo", "hi", "_exact", "_counts", "_exponent"))

    def __init__(self, spec: QuantSpec, bins: int = BINS) -> None:
        super().__init__(spec)
        self.histogram = StreamingHistogram(bins)
        self._found: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        """Return the range (channels,) and (channels,) for a histogram of finite values."""

    def observe(self, x: Tensor) -> None:
        self.histogram.add(as_rows(x, self.spec))
        self._found = None

    def range(self) -> tuple[Tensor, Tensor]:
        """The range that the search finds; the same data is searched only once."""
        if self._found is None:
            known = self.histogram.range()
            self._found = self.shaped(*(self.search(self.histogram) if self.histogram.finite else known))
        return self._found

    def seen(self) -> tuple[Tensor, Tensor]:
        return self.shaped(*self.histogram.range())

    def absorb(self, other: Self) -> None:
        self.histogram.merge(other.histogram)
        self._found = None
