"""LSQPlusObserver: the starting scale of LSQ+ (Bhalgat et al. 2020).

symmetric   scale = max(|mean - 3·std|, |mean + 3·std|) / 2^(b-1)      (2^b for unsigned formats)
affine      [max(min x, mean - 3·std), min(max x, mean + 3·std)]
"""

import torch
from torch import Tensor

from bitwright.observers.base import register_observer
from bitwright.observers.clip_std import ClipStdObserver
from bitwright.observers.search.scale_range import range_of_scale
from bitwright.observers.state.moments import Moments
from bitwright.spec import QuantSpec


@register_observer("LSQPlusObserver", aliases=("lsq_plus", "LSQ_PLUS"))
class LSQPlusObserver(ClipStdObserver):
    """Three standard deviations around the mean; ``std_scale`` says how many."""

    def __init__(self, spec: QuantSpec, std_scale: float = 3.0) -> None:
        super().__init__(spec, std_scale)

    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        if not self.spec.symmetric:
            return super().from_moments(moments)
        below, above = self.around(moments)
        scale = torch.maximum(below.abs(), above.abs()) / (self.spec.qmax + 1)
        return range_of_scale(scale, moments.lo, self.spec)
