"""MinMaxFloorObserver: a power-of-two scale for Vitis hardware.  scale = 2**e with the least squared error.

e runs from ceil(log2(scale of min-max)), which holds everything, down by ``candidates`` - 1.
"""

import torch
from torch import Tensor

from bitwright.observers.base import register_observer
from bitwright.observers.histogram_base import HistogramBase
from bitwright.observers.search.floating import refuse_floating
from bitwright.observers.search.power_of_two import best_exponent, check_candidates
from bitwright.observers.search.scale_range import range_of_scale
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec


@register_observer("MinMaxFloorObserver", aliases=("minmax_floor",))
class MinMaxFloorObserver(HistogramBase):
    """Power-of-two scale by least squared error; the order of batches does not matter.

    Args:
        candidates: exponents to try; 1 holds the whole range, as Vitis does for inputs.
        bins: bins per channel, a power of two.
    """

    def __init__(self, spec: QuantSpec, candidates: int = 5, bins: int = BINS) -> None:
        super().__init__(spec, bins)
        refuse_floating("MinMaxFloorObserver", spec)
        self.candidates = check_candidates(candidates)

    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        scale = torch.exp2(best_exponent(histogram, self.spec, self.candidates))
        return range_of_scale(scale, histogram.range()[0], self.spec)
