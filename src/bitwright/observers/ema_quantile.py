"""EMAQuantileObserver: a moving average of each batch's quantile.

c = the value that a share ``threshold`` of |x| does not exceed
lo = r·lo + (1 - r)·max(min x, -c),   hi = r·hi + (1 - r)·min(max x, c)
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.base import register_observer
from bitwright.observers.ema_base import EMASearchBase
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec


@register_observer("EMAQuantileObserver", aliases=("ema_quantile", "quantile"))
class EMAQuantileObserver(EMASearchBase):
    """Moving average of a quantile of the magnitude; the first batch is taken as it is.

    Args:
        ema_ratio: weight of the past, from 0 (only the last batch) to below 1.
        threshold: the quantile, above 0 and at most 1.
        bins: bins per channel, a power of two.
    """

    def __init__(self, spec: QuantSpec, ema_ratio: float = 0.9, threshold: float = 0.99999, bins: int = BINS) -> None:
        super().__init__(spec, ema_ratio, bins)
        if not 0 < threshold <= 1:
            raise ConfigError(f"threshold must be above 0 and at most 1, not {threshold}")
        self.threshold = threshold

    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        lo, hi = histogram.range()
        clip = histogram.folded().quantile(self.threshold)
        return torch.maximum(lo, -clip), torch.minimum(hi, clip)
