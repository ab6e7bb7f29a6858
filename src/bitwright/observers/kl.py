"""KLObserver: the threshold that loses the least information (entropy calibration, ``search/entropy.py``)."""

import torch
from torch import Tensor

from bitwright.observers.base import register_observer
from bitwright.observers.histogram_base import HistogramBase
from bitwright.observers.search.entropy import least_divergence
from bitwright.observers.search.floating import refuse_floating
from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.spec import QuantSpec

BINS = 2048  # half of them for magnitudes


@register_observer("KLObserver", aliases=("kl", "KL", "kl_histogram", "KL_HISTOGRAM", "entropy"))
class KLObserver(HistogramBase):
    """Threshold of least Kullback-Leibler divergence; the order of batches does not matter.

    Affine specs cut both ends at the threshold, and give all levels to one side if all data is on it.
    Where the format has as many levels as the histogram has bins of magnitudes, nothing is cut.

    Args:
        bins: bins per channel, a power of two; half of them serve the magnitudes.
    """

    def __init__(self, spec: QuantSpec, bins: int = BINS) -> None:
        super().__init__(spec, bins)
        refuse_floating("KLObserver", spec)

    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        lo, hi = histogram.range()
        clip = self._threshold(histogram, (lo >= 0) | (hi <= 0))
        return torch.maximum(lo, -clip), torch.minimum(hi, clip)

    def _threshold(self, histogram: StreamingHistogram, one_sided: Tensor) -> Tensor:
        if self.spec.symmetric:
            return least_divergence(histogram, self.spec.qmax + 1)
        levels = self.spec.qmax - self.spec.qmin + 1
        if bool(one_sided.all()):
            return least_divergence(histogram, levels)
        both_sides = least_divergence(histogram, max(1, levels // 2))
        if not bool(one_sided.any()):
            return both_sides
        return torch.where(one_sided, least_divergence(histogram, levels), both_sides)
