"""ClipStdObserver: clips to k standard deviations.  [max(min x, mean - k·std), min(max x, mean + k·std)], k = 2.6."""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.base import register_observer
from bitwright.observers.moments_base import MomentsBase
from bitwright.observers.state.moments import Moments
from bitwright.spec import QuantSpec


@register_observer("ClipStdObserver", aliases=("clip_std",))
class ClipStdObserver(MomentsBase):
    """Mean ± k standard deviations of all values, never wider than the data; usual for DSQ.

    Args:
        std_scale: k, the number of standard deviations.
    """

    def __init__(self, spec: QuantSpec, std_scale: float = 2.6) -> None:
        super().__init__(spec)
        if not std_scale > 0:
            raise ConfigError(f"std_scale must be above 0, not {std_scale}")
        self.std_scale = std_scale

    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        below, above = self.around(moments)
        return torch.maximum(below, moments.lo.double()), torch.minimum(above, moments.hi.double())

    def around(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Mean ± k·std."""
        reach = self.std_scale * moments.std()
        return moments.mean - reach, moments.mean + reach
