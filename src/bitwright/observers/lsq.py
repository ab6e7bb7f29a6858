"""LSQObserver: the starting scale of LSQ (Esser et al. 2020).  scale = 2·mean|x| / sqrt(qmax)."""

from torch import Tensor

from bitwright.observers.base import register_observer
from bitwright.observers.moments_base import MomentsBase
from bitwright.observers.search.scale_range import range_of_scale
from bitwright.observers.state.moments import Moments


@register_observer("LSQObserver", aliases=("lsq", "LSQ"))
class LSQObserver(MomentsBase):
    """Scale from the mean magnitude of all values; affine specs take the zero point from the lowest value."""

    needs = ("magnitude",)

    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        scale = 2 * moments.mean_magnitude() / self.spec.qmax**0.5
        return range_of_scale(scale, moments.lo, self.spec)
