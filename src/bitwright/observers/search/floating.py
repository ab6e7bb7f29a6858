"""The range with the least error for fp8, whose grid is not uniform, tried on values or bins as they are.

    error(top) = sum over values of |x - s·fp8(x / s)|**p,   s = top / the format's largest number

Moving the range by a power of two changes only what is clipped and what is too small, so candidates go far down.
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.numerics.fp8 import BY_NAME, to_fp8
from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.spec import QuantSpec

PER_OCTAVE, OCTAVES = 16, 8  # candidates of the first scan, and how far down they go
CACHED = 1 << 18  # values per intermediate tensor


def search_floating(histogram: StreamingHistogram, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """The range (channels,) and (channels,) with the least error; a bin's values are taken at its middle."""
    lo, hi = histogram.range()
    points, weights = weighted_points(histogram)
    reach = torch.maximum(-lo, hi).clamp(min=0.0)
    best, top = torch.full_like(reach, torch.inf, dtype=torch.float64), reach.clone()
    wide, step = PER_OCTAVE * OCTAVES + 1, 1 / PER_OCTAVE
    for octaves in ([i * step for i in range(wide)], [i * step / 8 for i in range(-8, 9) if i]):
        around = top
        for part in octaves:
            tried = torch.minimum(reach, around * 2.0**-part)
            cost = floating_error(points, weights, tried, spec, p)
            better = cost < best * (1 - 1e-6)
            best, top = torch.where(better, cost, best), torch.where(better, tried, top)
    return torch.maximum(lo, -top).clamp(max=0.0), torch.minimum(hi, top).clamp(min=0.0)


def weighted_points(histogram: StreamingHistogram) -> tuple[Tensor, Tensor | None]:
    """Kept values, each counting once, or the middles of bins and how often they come."""
    values = histogram.exact()
    if values is not None:
        return values, None
    counts, edges = histogram.edges()
    return ((edges[:, 1:] + edges[:, :-1]) / 2).float(), counts.float()


def floating_error(points: Tensor, weights: Tensor | None, top: Tensor, spec: QuantSpec, p: float) -> Tensor:
    """Sum of the error to the power ``p`` for one range [-top, top] of each channel."""
    kind, rows = BY_NAME[spec.format.name], max(1, CACHED // points.shape[1])
    scale = (top / kind.top).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    costs = torch.empty_like(top, dtype=torch.float64)
    for c in range(0, len(points), rows):
        at = slice(c, c + rows)
        away = (to_fp8(points[at] / scale[at], kind).float() * scale[at]).sub_(points[at]).abs_().pow_(p)
        costs[at] = (away if weights is None else away.mul_(weights[at])).sum(1, dtype=torch.float64)
    return costs


def refuse_floating(name: str, spec: QuantSpec) -> None:
    """Raise if a search that needs integers is given a floating-point spec."""
    if spec.format.floating:
        raise ConfigError(f"{name} needs integers, and '{spec}' has none: choose MSEObserver or MinMaxObserver")
