"""HistogramObserver: counts all values.  lo and hi leave out (100 - percentile)/2 percent of them on either side."""

from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.base import register_observer
from bitwright.observers.histogram_base import HistogramBase
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec


@register_observer("HistogramObserver", aliases=("histogram", "HISTOGRAM"))
class HistogramObserver(HistogramBase):
    """A histogram to look at (``histogram.counts()``, ``histogram.edges()``), and a range from its percentiles.

    Args:
        bins: bins per channel, a power of two.
        percentile: share of the values to hold, in percent; 100 gives minimum and maximum.
    """

    def __init__(self, spec: QuantSpec, bins: int = BINS, percentile: float = 100.0) -> None:
        super().__init__(spec, bins)
        if not 50 <= percentile <= 100:
            raise ConfigError(f"percentile must be from 50 to 100, not {percentile}")
        self.percentile = percentile

    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        if self.percentile == 100:
            return histogram.range()
        left_out = (100 - self.percentile) / 200
        return histogram.quantile(left_out), histogram.quantile(1 - left_out)
