"""The range with the least error for few values: a dense scan of their own errors, then closer looks at its best.

A candidate is a scale and a zero point. The scale that holds everything costs n values at most (scale / 2)**p each;
cutting off more than n**(1/p) half steps costs more than that already. So shrunken ranges are tried only down to

    1 - (n**(1/p) + 1) / (qmax - qmin)

of the range. For an affine spec, what is cut off is shared out between both ends.
"""

import math

import torch
from torch import Tensor

from bitwright.numerics import scale_and_zero_point
from bitwright.observers.search.samples import Samples, error, neighbours
from bitwright.spec import QuantSpec

FEW = 256  # values per channel
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of what is cut off, at the low end
PARTS = 4  # candidates for each step of the grid that the cut grows
MOST = 160  # ranges to try, before they are shared out
LOOKS = (8, 2, 2)  # candidates to look closer at, each time in a quarter of the distance


def search_few(values: Tensor, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """The range (channels,) and (channels,) with the least error for values (channels, values)."""
    lo, hi = (v.double().unsqueeze(1) for v in values.aminmax(dim=1))
    lo, hi = lo.clamp(max=0.0), hi.clamp(min=0.0)
    samples = Samples.of_values(values.sort(dim=1).values, spec)  # sums that do not depend on their order
    shrink, step = _shrunken(values.shape[1], spec, p)
    shrink = shrink.to(lo.device)
    lows, highs = lo * shrink, hi * shrink
    if not spec.symmetric and bool(((lo < 0) & (hi > 0)).any()):
        cut = (hi - lo) * (1 - shrink)
        lows = torch.cat([lows, *(lo + cut * share for share in SHARES)], 1).clamp(max=0.0)
        highs = torch.cat([highs, *(hi - cut * (1 - share) for share in SHARES)], 1).clamp(min=0.0)
    scale, zero_point = (v.double() for v in scale_and_zero_point(lows, highs, spec))
    costs = error(samples, scale, zero_point, spec, p)
    widest = scale[:, :1]
    # Each candidate first, then its neighbours.
    around = torch.tensor([0, -3, -2, -1, 1, 2, 3], dtype=torch.float64, device=scale.device)
    shifts = torch.tensor([0] if spec.symmetric else [0, -1, 1], dtype=torch.float64, device=scale.device)
    for count in () if spec.power_of_two else LOOKS:
        best = costs.argsort(dim=1, stable=True)[:, :count]
        step /= 4
        near, limits = 1 + step * around, (spec.qmin, spec.qmax)
        scale, zero_point = neighbours(scale.gather(1, best), zero_point.gather(1, best), near, shifts, limits)
        scale = scale.minimum(widest)
        costs = error(samples, scale, zero_point, spec, p)
    best = costs.argsort(dim=1, stable=True)[:, :1]
    scale, zero_point = scale.gather(1, best).squeeze(1), zero_point.gather(1, best).squeeze(1)
    lo, hi = lo.squeeze(1), hi.squeeze(1)
    if spec.symmetric:
        return torch.maximum(lo, -scale * spec.qmax), torch.minimum(hi, scale * spec.qmax)
    return (spec.qmin - zero_point) * scale, (spec.qmax - zero_point) * scale


def _shrunken(count: int, spec: QuantSpec, p: float) -> tuple[Tensor, float]:
    """The parts of the range to try, from 1 down, and the distance between them."""
    levels = 2 * spec.qmax if spec.symmetric and spec.format.signed else spec.qmax - spec.qmin
    span = 0.98 if spec.power_of_two else min(0.98, (count ** (1 / p) + 1) / levels)
    tried = min(MOST, max(16, math.ceil(span * levels * PARTS)))
    return torch.linspace(1, 1 - span, tried + 1, dtype=torch.float64), span / tried
