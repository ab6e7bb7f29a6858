"""PercentileObserver: clips the tails, each side separately.

hi = the value that percentile % of the positive values do not exceed       (the maximum if there are none)
lo = the value that percentile % of the negative values do not fall below   (the minimum if there are none)
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.base import register_observer
from bitwright.observers.histogram_base import HistogramBase
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec


@register_observer("PercentileObserver", aliases=("percentile", "PERCENTILE"))
class PercentileObserver(HistogramBase):
    """A percentile of the negative and one of the positive values.

    Args:
        percentile: share of each side's values to hold, in percent.
        alpha: the share to leave out instead, as in other toolkits: ``alpha=0.001`` is ``percentile=99.9``.
        bins: bins per channel, a power of two.
    """

    def __init__(self, spec: QuantSpec, percentile: float = 99.9, alpha: float | None = None, bins: int = BINS) -> None:
        super().__init__(spec, bins)
        if alpha is not None and not 0 <= alpha < 1:
            raise ConfigError(f"alpha must be at least 0 and below 1, not {alpha}")
        self.percentile = percentile if alpha is None else 100 * (1 - alpha)
        if not 0 < self.percentile <= 100:
            raise ConfigError(f"percentile must be above 0 and at most 100, not {percentile}")

    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        lo, hi = histogram.range()
        below, above = histogram.share_of_signs()
        out = 1 - self.percentile / 100
        low = torch.where(below > 0, histogram.quantile(below * out), lo)
        high = torch.where(above > 0, histogram.quantile(1 - above * out), hi)
        return low.clamp(max=0).maximum(lo).minimum(hi), high.clamp(min=0).minimum(hi).maximum(lo)
