"""Search for the range with the least quantization error, on kept values or on a histogram, all channels at once.

    error(scale, z) = mean |x - dequantize(quantize(x))|**p

On a histogram the values of a bin are spread evenly over it, and the error is integrated exactly, however bins and
steps lie: with u = x / scale, k = clamp(round(u), qmin - z, qmax - z) and r = u - k,

    integral from 0 to x of |t - q(t)|**p dt = scale**(p + 1) · (r·|r|**p + k·2**-p) / (p + 1)

so the sum over bins of density · (integral at the right edge - at the left) is one product of a matrix (candidates ×
edges) with a vector: the differences of neighbouring densities.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitwright.errors import ConfigError
from bitwright.numerics import scale_and_zero_point
from bitwright.observers.streaming import StreamingHistogram
from bitwright.spec import QuantSpec

CACHED = 1 << 15  # values per intermediate tensor


@dataclass(frozen=True)
class Samples:
    """What an error is summed over: ``points`` and their ``weights``, both (channels, points), in float64.

    With ``integral`` the points are edges of bins and the weights differences of densities. ``ends`` are then the
    lowest and the highest value with all of their bins: many values may be just there (0 and 6 of a ReLU6).
    """

    points: Tensor
    weights: Tensor
    integral: bool = False
    ends: "Samples | None" = None

    @classmethod
    def of(cls, histogram: StreamingHistogram, most_bins: int) -> "Samples":
        """The kept values of a histogram or, if there are too many, its bins, merged down to about ``most_bins``."""
        values = histogram.exact()
        if values is not None:
            points = values.double()
            return cls(points, torch.full_like(points, 1 / points.shape[1]))
        counts, edges = histogram.edges()
        counts, total = counts.double(), counts.sum(1, keepdim=True)
        found = counts > 0
        at = torch.arange(counts.shape[1], device=counts.device)
        outermost = [
            torch.where(found, at, counts.shape[1]).amin(1, keepdim=True),
            torch.where(found, at, -1).amax(1, keepdim=True),
        ]
        weights = []
        for place in outermost:
            weights.append(counts.gather(1, place) / total)
            counts = counts.scatter(1, place, 0.0)
        ends = cls(torch.stack(histogram.range(), 1).double(), torch.cat(weights, 1))
        step = max(1, histogram.bins // most_bins)
        if step > 1:
            keep = torch.arange(0, edges.shape[1] + step - 1, step, device=edges.device).clamp(max=edges.shape[1] - 1)
            sums = pad(counts.cumsum(1), (1, 0))
            counts, edges = sums[:, keep].diff(dim=1), edges[:, keep]
        density = torch.where(counts > 0, counts / edges.diff(dim=1), 0.0) / total
        return cls(edges, -pad(density, (1, 1)).diff(dim=1), integral=True, ends=ends)


def check_power(p: float) -> float:
    """Return ``p`` if errors can be raised to it."""
    if not p > 0:
        raise ConfigError(f"p, the power of the error, must be above 0, not {p}")
    return float(p)


def error(samples: Samples, scale: Tensor, zero_point: Tensor, spec: QuantSpec, p: float) -> Tensor:
    """Mean error to the power ``p`` for scales and zero points of shape (channels, candidates), in that shape."""
    points, weights = samples.points.unsqueeze(1), samples.weights.unsqueeze(2)
    inverse = scale.double().reciprocal().unsqueeze(2)
    lowest, highest = ((q - zero_point.double()).unsqueeze(2) for q in (spec.qmin, spec.qmax))
    result = torch.empty_like(inverse)
    (channels, candidates), count = scale.shape, points.shape[2]
    wide = max(1, min(channels, CACHED // count))
    deep = max(1, min(candidates, CACHED // (count * wide)))
    # Memory is taken once: fresh memory for each block would cost more than the arithmetic.
    memory = result.new_empty(2, wide, deep, count)
    for c in range(0, channels, wide):
        for k in range(0, candidates, deep):
            at = (slice(c, c + wide), slice(k, k + deep))
            away, level = memory[:, : channels - c, : candidates - k]  # (channels', candidates', points)
            torch.mul(points[at[0]], inverse[at], out=away)
            torch.clamp(torch.round(away, out=level), lowest[at], highest[at], out=level)
            away -= level
            if samples.integral:
                level *= 2.0**-p
                level += away.pow_(3) if p == 2 else away.abs().pow_(p).mul_(away)
            else:
                level = away.abs_().pow_(p)
            result[at] = level @ weights[at[0]]
    factor = scale.double() ** (p + 1) / (p + 1) if samples.integral else scale.double() ** p
    total = result.squeeze(2) * factor
    return total if samples.ends is None else total + error(samples.ends, scale, zero_point, spec, p)


def least_error_range(histogram: StreamingHistogram, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """The range (channels,) and (channels,) with the least error: a wide scan, then finer ones around its best.

    Symmetric specs have one free end. For affine ones both ends shrink together, or the magnitude is cut, in the
    first scan; then each end moves by its own.
    """
    lo, hi = (v.double().unsqueeze(1) for v in histogram.range())
    lo, hi = lo.clamp(max=0.0), hi.clamp(min=0.0)
    levels = spec.qmax - spec.qmin + 1
    coarse = Samples.of(histogram, max(256, 4 * levels))
    fine = Samples.of(histogram, max(256, 16 * levels)) if coarse.integral else coarse

    def best(samples: Samples, lows: Tensor, highs: Tensor) -> tuple[Tensor, Tensor]:
        lows, highs = torch.broadcast_tensors(lows.clamp(min=lo), highs.clamp(max=hi))
        costs = error(samples, *scale_and_zero_point(lows, highs, spec), spec, p)
        at = costs.argmin(1, keepdim=True)
        return lows.gather(1, at), highs.gather(1, at)

    def factors(ratio: float, count: int) -> Tensor:
        return ratio ** torch.arange(count, dtype=torch.float64, device=lo.device)

    if coarse.integral:
        shrink = factors(0.93, 64)
    else:  # the error of few values has many dips
        shrink = torch.cat([1 - 0.01 * torch.arange(80, dtype=torch.float64, device=lo.device), 0.2 * factors(0.9, 28)])
    lows, highs = lo * shrink, hi * shrink
    free = (lo < 0) & (hi > 0)  # channels with two ends to search
    both_ends = not spec.symmetric and bool(free.any())
    if both_ends:
        reach = torch.maximum(-lo, hi) * shrink
        lows, highs = torch.cat([lows, torch.maximum(lo, -reach)], 1), torch.cat([highs, torch.minimum(hi, reach)], 1)
    low, high = best(coarse, lows, highs)
    if both_ends:
        around = torch.cat([factors(0.9, 8), factors(1 / 0.9, 8)[1:]])
        for _ in range(2):
            low, high = best(coarse, low, torch.where(free, high * around, high))
            low, high = best(coarse, torch.where(free, low * around, low), high)
    near = torch.cat([factors(0.993, 11), factors(1 / 0.993, 11)[1:]])
    low, high = best(fine, low * near, high * near)
    if both_ends:
        low, high = best(fine, low, torch.where(free, high * near, high))
        low, high = best(fine, torch.where(free, low * near, low), high)
    return low.squeeze(1), high.squeeze(1)
