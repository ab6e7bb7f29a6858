"""EMAMSEObserver: a moving average of each batch's range with the least quantization error.

[lo', hi'] = argmin of mean |x - x_q|**p over the batch
lo = r·lo + (1 - r)·lo',   hi = r·hi + (1 - r)·hi'
"""

from torch import Tensor

from bitwright.observers.base import register_observer
from bitwright.observers.ema_base import EMASearchBase
from bitwright.observers.search.least_error import check_power, least_error_range
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec


@register_observer("EMAMSEObserver", aliases=("ema_mse",))
class EMAMSEObserver(EMASearchBase):
    """Searches each batch separately and averages; the first batch is taken as it is.

    Args:
        p: the power of the error; 2 is the mean squared error.
        ema_ratio: weight of the past, from 0 (only the last batch) to below 1.
        bins: bins per channel, a power of two.
    """

    def __init__(self, spec: QuantSpec, p: float = 2.0, ema_ratio: float = 0.9, bins: int = BINS) -> None:
        super().__init__(spec, ema_ratio, bins)
        self.p = check_power(p)

    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        return least_error_range(histogram, self.spec, self.p)
