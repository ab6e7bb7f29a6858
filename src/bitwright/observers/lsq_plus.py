"""LSQPlusObserver: the starting scale of LSQ+ (Bhalgat et al. 2020).

symmetric   scale = max(|mean - 3·std|, |mean + 3·std|) / 2^(b-1)      (2^b for unsigned formats)
affine      [max(min x, mean - 3·std), min(max x, mean + 3·std)]
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.base import register_observer
from bitwright.observers.moments_base import MomentsBase
from bitwright.observers.search.scale_range import range_of_scale
from bitwright.observers.state.moments import Moments
from bitwright.spec import QuantSpec


@register_observer("LSQPlusObserver", aliases=("lsq_plus", "LSQ_PLUS"))
class LSQPlusObserver(MomentsBase):
    """Three standard deviations around the mean.

    Args:
        spec: what the range is for.
        std_scale: how many standard deviations.
    """

    def __init__(self, spec: QuantSpec, std_scale: float = 3.0) -> None:
        super().__init__(spec)
        if not std_scale > 0:
            raise ConfigError(f"std_scale must be above 0, not {std_scale}")
        self.std_scale = std_scale

    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """The range of mean ± 3·std, as a scale where the spec is symmetric."""
        reach = self.std_scale * moments.std()
        below, above = moments.mean - reach, moments.mean + reach
        if self.spec.symmetric:
            scale = torch.maximum(below.abs(), above.abs()) / (self.spec.qmax + 1)
            return range_of_scale(scale, moments.lo, self.spec)
        return torch.maximum(below, moments.lo.double()), torch.minimum(above, moments.hi.double())
