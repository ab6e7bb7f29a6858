"""MSEObserver: the range with the least quantization error.  argmin over [lo, hi] of mean |x - x_q|**p."""

from torch import Tensor

from bitwright.observers.base import register_observer
from bitwright.observers.histogram_base import HistogramBase
from bitwright.observers.search.least_error import check_power, least_error_range
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec


@register_observer("MSEObserver", aliases=("mse", "MSE"))
class MSEObserver(HistogramBase):
    """Searches the range with the least error; the order of batches does not matter.

    Args:
        p: the power of the error; 2 is the mean squared error.
        bins: bins per channel, a power of two.
    """

    def __init__(self, spec: QuantSpec, p: float = 2.0, bins: int = BINS) -> None:
        super().__init__(spec, bins)
        self.p = check_power(p)

    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        return least_error_range(histogram, self.spec, self.p)
