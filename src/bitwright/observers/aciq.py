"""ACIQObserver: analytic clipping for a Gaussian or a Laplace distribution (Banner et al. 2019).

With the clip at a (in standard deviations, or in Laplace's b) and M bits, the expected squared error is

    Gauss     2·[(1 + a²)·Q(a) - a·f(a)] + a² / (3·4^M)      least where  2·(f(a) - a·Q(a)) = a / (3·4^M)
    Laplace   2·exp(-a) + a² / (3·4^M)                       least where  exp(-a) = a / (3·4^M)

with f the normal density and Q its upper tail. One-sided data (after a ReLU) has all levels for half of the
distribution: M + 1. The range is mean ± a·spread (one-sided: [0, a·spread]) within the data.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bitwright.errors import ConfigError, suggest
from bitwright.observers.base import register_observer
from bitwright.observers.moments_base import MomentsBase
from bitwright.observers.state.moments import Moments
from bitwright.spec import QuantSpec


@register_observer("ACIQObserver", aliases=("aciq", "ACIQ"))
class ACIQObserver(MomentsBase):
    """Optimal clipping from two moments, without a search.

    Args:
        distribution: ``"gaus"`` or ``"laplace"``.
    """

    needs = ("spread", "magnitude", "nonzero")

    def __init__(self, spec: QuantSpec, distribution: str = "gaus") -> None:
        super().__init__(spec)
        if distribution not in _SLOPES:
            raise ConfigError(f"unknown distribution {distribution!r}{suggest(distribution, _SLOPES)}")
        self.distribution = distribution

    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        lo, hi = moments.lo.double(), moments.hi.double()
        one_sided = (lo >= 0) | (hi <= 0)
        gaussian = self.distribution == "gaus"
        spread = moments.std()
        if not gaussian:  # far from zero |x| tells nothing of b, but the variance does: it is 2·b²
            b = laplace_scale(moments.mean_magnitude(), moments.mean)
            spread = torch.where(moments.mean.abs() < spread, b, spread / 2**0.5)
        # One half of a distribution around zero: its second (first) moment about zero. Zeros are the other half.
        share = (moments.nonzero / moments.count).clamp(min=1 / moments.count)
        half = (moments.square / moments.count + moments.mean**2).div(share).sqrt()
        half = half if gaussian else moments.mean_magnitude() / share
        single = one_sided & (not (self.spec.symmetric and self.spec.format.signed))
        reach = torch.where(
            one_sided,
            half * torch.where(single, self.clip(self.spec.bits + 1), self.clip(self.spec.bits)),
            spread * self.clip(self.spec.bits),
        )
        centre = torch.where(one_sided, 0.0, moments.mean)
        return torch.maximum(lo, centre - reach), torch.minimum(hi, centre + reach)

    def clip(self, bits: int) -> float:
        """The best a for so many bits."""
        return best_clip(self.distribution, bits)


def best_clip(distribution: str, bits: int) -> float:
    """The clip of least expected squared error, in standard deviations (gaus) or units of b (laplace)."""
    below, above = 0.0, 64.0
    for _ in range(80):
        middle = (below + above) / 2
        if _SLOPES[distribution](middle) > middle / (3 * 4.0**bits):
            below = middle
        else:
            above = middle
    return (below + above) / 2


def _gauss(a: float) -> float:
    density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    return 2 * (density - a * math.erfc(a / math.sqrt(2)) / 2)


def _laplace(a: float) -> float:
    return math.exp(-a)


_SLOPES: dict[str, Callable[[float], float]] = {"gaus": _gauss, "laplace": _laplace}


def laplace_scale(magnitude: Tensor, mean: Tensor) -> Tensor:
    """Laplace's b from mean |x| and mean x: the solution of  mean |x| = |m| + b·exp(-|m| / b)."""
    centre = mean.abs()
    below, above = torch.zeros_like(magnitude), magnitude.clone()
    for _ in range(60):
        middle = (below + above) / 2
        small = centre + middle * torch.exp(-centre / middle.clamp(min=1e-300)) < magnitude
        below, above = torch.where(small, middle, below), torch.where(small, above, middle)
    return torch.where(magnitude.isfinite(), (below + above) / 2, magnitude)
