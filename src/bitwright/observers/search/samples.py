"""What a quantization error is summed over, kept values or the bins of a histogram, and the error for given scales.

    error(scale, z) = sum over values of |x - dequantize(quantize(x))|**p

In a bin the values are spread evenly, and the error is integrated exactly, however bins and steps lie: with
u = x / scale, k = clamp(round(u), qmin - z, qmax - z) and r = u - k,

    integral from 0 to x of |t - q(t)|**p dt = scale**(p + 1) · (r·|r|**p + k·2**-p) / (p + 1)

so the sum over bins of density · (integral at the right edge - at the left) is one product of a matrix (candidates ×
edges) with a vector: the differences of neighbouring densities.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.spec import QuantSpec

CACHED = 1 << 16  # values per intermediate tensor
MANY_LEVELS = 1 << 12  # above this, float32 does not tell x / scale from its integer well enough


@dataclass(frozen=True)
class Samples:
    """Points and how often they come, both (channels, points).

    With ``integral`` the points are edges of bins and the weights differences of densities. ``ends`` are then the
    lowest and the highest value with all of their bins: many values may be just there (0 and 6 of a ReLU6).
    """

    points: Tensor
    weights: Tensor
    integral: bool = False
    ends: "Samples | None" = None
    ones: bool = False  # every weight is one

    @classmethod
    def of_values(cls, values: Tensor, spec: QuantSpec) -> "Samples":
        """Values (channels, values) as they are."""
        points = values.to(_precision(spec))
        return cls(points, points.new_ones(1, 1).expand(points.shape), ones=True)

    @classmethod
    def of_bins(cls, counts: Tensor, ends: "Samples", spec: QuantSpec, most_bins: int) -> "Samples":
        """Counts (channels, bins) over [-1, 1), joined to about ``most_bins``; see :func:`split_ends`."""
        while counts.shape[1] > most_bins:
            counts = counts[:, 0::2] + counts[:, 1::2]
        edges = torch.linspace(-1, 1, counts.shape[1] + 1, dtype=_precision(spec), device=counts.device)
        density = counts.to(edges) * (counts.shape[1] / 2)
        weights = -pad(density, (1, 1)).diff(dim=1)
        return cls(edges.unsqueeze(0).expand(weights.shape), weights, integral=True, ends=ends)

    @classmethod
    def of(cls, histogram: StreamingHistogram, spec: QuantSpec, most_bins: int) -> tuple["Samples", Tensor]:
        """The kept values of a histogram or, if there are too many, its bins; and the unit (channels,) they are in."""
        values = histogram.exact()
        if values is not None:
            return cls.of_values(values, spec), values.new_ones(len(values), dtype=torch.float64)
        counts, ends, unit = split_ends(histogram)
        return cls.of_bins(counts, ends, spec, most_bins), unit


def split_ends(histogram: StreamingHistogram) -> tuple[Tensor, Samples, Tensor]:
    """Counts (channels, bins) in float32 without the outermost ones, these, and the unit that makes bins [-1, 1)."""
    counts, width = histogram.counts()
    half = histogram.bins // 2
    unit = width * half
    ends = torch.stack(histogram.range(), 1).double()
    places = (ends / width.unsqueeze(1)).floor().long() + half
    counts = counts.float()
    weights = counts.gather(1, places)
    weights[:, 1] *= places[:, 0] != places[:, 1]  # one bin holds both: count it once
    return counts.scatter_(1, places, 0.0), Samples((ends / unit.unsqueeze(1)).float(), weights), unit


def error(samples: Samples, scale: Tensor, zero_point: Tensor, spec: QuantSpec, p: float) -> Tensor:
    """Sum of the error to the power ``p`` for scales and zero points of (channels, candidates), in that shape."""
    points, weights = samples.points.unsqueeze(1), samples.weights.unsqueeze(1)
    inverse = scale.double().reciprocal().to(points).unsqueeze(2)
    lowest, highest = ((q - zero_point.to(points)).unsqueeze(2) for q in (spec.qmin, spec.qmax))
    (channels, candidates), count = scale.shape, points.shape[2]
    result = points.new_empty(channels, candidates)
    wide = max(1, min(channels, CACHED // count))
    deep = max(1, min(candidates, CACHED // (count * wide)))
    # Memory is taken once: fresh memory for each block would cost more than the arithmetic.
    memory = points.new_empty(2, wide * deep * count)
    for c, k in itertools.product(range(0, channels, wide), range(0, candidates, deep)):
        at = (slice(c, c + wide), slice(k, k + deep))
        shape = (min(wide, channels - c), min(deep, candidates - k), count)
        away, level = (v[: shape[0] * shape[1] * count].view(shape) for v in memory)
        torch.mul(points[at[0]], inverse[at], out=away)
        torch.round(away, out=level)
        if spec.symmetric:
            level.clamp_(spec.qmin, spec.qmax)
        else:  # clamp with tensors takes four times as long
            torch.minimum(torch.maximum(level, lowest[at], out=level), highest[at], out=level)
        away -= level
        if samples.ones and p == 2:
            result[at] = torch.linalg.vector_norm(away, 2, 2).square_()
        else:
            costs = _integral(away, level, p) if samples.integral else _power(away.abs_(), p)
            result[at] = costs.mul_(weights[at[0]]).sum(2)
    factor = scale.double() ** (p + 1) / (p + 1) if samples.integral else scale.double() ** p
    total = result.double() * factor
    return total if samples.ends is None else total + error(samples.ends, scale, zero_point, spec, p)


def neighbours(
    scale: Tensor, zero_point: Tensor, near: Tensor, shifts: Tensor, limits: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Each of (channels, candidates) with its scale times ``near`` and its zero point plus ``shifts``."""
    scales = scale[:, :, None, None] * near[:, None]
    zeros = (zero_point[:, :, None, None] + shifts).clamp(*limits)
    scales, zeros = torch.broadcast_tensors(scales, zeros)
    return scales.flatten(1), zeros.flatten(1)


def _integral(away: Tensor, level: Tensor, p: float) -> Tensor:
    """The integral of ``|away| ** p`` up to here, in units of a factor, in the memory of ``level``."""
    level *= 2.0**-p
    return level.add_(away.pow_(3) if p == 2 else _power(away.abs(), p).mul_(away))


def _power(magnitude: Tensor, p: float) -> Tensor:
    """``magnitude ** p`` in place; through logarithms, which is several times faster than ``pow``."""
    if p == 1:
        return magnitude
    return magnitude.square_() if p == 2 else magnitude.log2_().mul_(p).exp2_()


def _precision(spec: QuantSpec) -> torch.dtype:
    return torch.float32 if spec.qmax - spec.qmin < MANY_LEVELS else torch.float64
