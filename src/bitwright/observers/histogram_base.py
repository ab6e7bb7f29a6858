"""HistogramBase: what all observers share that read their range off a streaming histogram."""

from abc import abstractmethod

from torch import Tensor

from bitwright.observers.base import Observer, check_same_kind
from bitwright.observers.state.rows import as_params, as_rows
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec


class HistogramBase(Observer):
    """Counts all values; subclasses write ``search``, which finds the range of each channel.

    Args:
        spec: what the range is for.
        bins: bins per channel, a power of two.
    """

    def __init__(self, spec: QuantSpec, bins: int = BINS) -> None:
        super().__init__(spec)
        self.histogram = StreamingHistogram(bins)
        self._found: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        """Return the range (channels,) and (channels,) for a histogram of finite values."""

    def observe(self, x: Tensor) -> None:
        """Count the values of ``x``."""
        self.histogram.add(as_rows(x, self.spec))
        self._found = None

    def range(self) -> tuple[Tensor, Tensor]:
        """The range that the search finds; searched once for the same data."""
        if self._found is None:
            known = self.histogram.range()
            lo, hi = self.search(self.histogram) if self.histogram.finite else known
            self._found = (self._shaped(lo), self._shaped(hi))
        return self._found

    def seen(self) -> tuple[Tensor, Tensor]:
        """Lowest and highest value."""
        lo, hi = self.histogram.range()
        return self._shaped(lo), self._shaped(hi)

    def merge(self, other: Observer) -> None:
        """Add the counts of ``other``."""
        check_same_kind(self, other)
        if isinstance(other, HistogramBase) and other.batches:
            self.histogram.merge(other.histogram)
            self.param_shape = other.param_shape
            self.batches += other.batches
            self._found = None

    def _shaped(self, flat: Tensor) -> Tensor:
        return as_params(flat, self.spec, self.param_shape or ())
