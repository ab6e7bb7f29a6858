"""EMASearchBase: search each batch separately, and keep a moving average of the results."""

from abc import abstractmethod

from torch import Tensor

from bitwright.observers.ema_minmax import EMAMinMaxObserver
from bitwright.observers.state.rows import as_rows
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec


class EMASearchBase(EMAMinMaxObserver):
    """Moving average of the ranges that ``search`` finds for each batch; the first batch is taken as it is.

    Args:
        ema_ratio: weight of the past, from 0 (only the last batch) to below 1.
        bins: bins per channel, a power of two.
    """

    def __init__(self, spec: QuantSpec, ema_ratio: float = 0.9, bins: int = BINS) -> None:
        super().__init__(spec, ema_ratio)
        self.bins = StreamingHistogram(bins).bins

    @abstractmethod
    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        """Return the range (channels,) and (channels,) for a histogram of finite values."""

    def observe(self, x: Tensor) -> None:
        histogram = StreamingHistogram(self.bins)
        histogram.add(as_rows(x, self.spec))
        found = self.search(histogram) if histogram.finite else histogram.range()
        self.move(*self.shaped(*found))
