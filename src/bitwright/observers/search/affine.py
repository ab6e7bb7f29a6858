"""The affine range with the least error for formats of few levels: every scale with every zero point.

A grid of a scale s with a levels below zero reaches from -a·s to (levels - a)·s. In units of a channel's range (or, for
bins, of their span) all channels try the same pairs (s, a): a table tells what a value costs with each of them, and a
channel's errors are the sum of its values' rows, or the product of its counts with the table (``tables.py``). Around
the best pairs the scale is then searched on the values or bins themselves.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from bitwright.observers.search.samples import Samples, error, neighbours, split_ends
from bitwright.observers.search.tables import COLUMNS, TINY, Candidate, cost_table
from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.spec import QuantSpec

MOST_LEVELS = 63
ZERO_POINTS = 32  # to try in the scan
ROWS, ROWS_PER_STEP = 1 << 13, 64  # of a table, at most and if possible
SMOOTH = 1024  # values, whose error has few dips
LEAST, GROWTH = 0.003, 1.1  # the least part of the range to try, and by how much steps grow below a fifth of it
LOOKS = ((3, (-0.6, -0.3, 0.0, 0.3, 0.6)), (1, (-0.2, -0.1, 0.0, 0.1, 0.2)))  # how many, and where between neighbours


class Scan(NamedTuple):
    """What a wide scan has found: the errors (channels, candidates) in units (channels,), and what they are of."""

    costs: Tensor
    tried: tuple[Candidate, ...]
    samples: Samples
    unit: Tensor
    step: float  # by which neighbouring scales differ


def search_affine(histogram: StreamingHistogram, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """The range (channels,) and (channels,) with the least error."""
    lo, hi = (v.double() for v in histogram.range())
    levels, values = spec.qmax - spec.qmin, histogram.exact()
    width = hi.clamp(min=0.0) - lo.clamp(max=0.0)
    scan = _scan_bins(histogram, spec, p) if values is None else _scan_values(values, width, spec, p)
    scale, below = _look_closer(scan, spec, p)
    size = (scale * scan.unit).where(width > 0, 0.0)
    return (-below * size).float(), ((levels - below) * size).float()


def _scan_bins(histogram: StreamingHistogram, spec: QuantSpec, p: float) -> Scan:
    counts, ends, unit = split_ends(histogram)
    levels, step = spec.qmax - spec.qmin, 0.05
    samples = Samples.of_bins(counts, ends, spec, max(2048, ROWS_PER_STEP * levels))
    tried = pairs(levels, (2.0, LEAST), step, spec.power_of_two)
    rows = min(_rows(levels), histogram.bins)
    joined = counts.view(len(counts), rows, -1).sum(2)
    costs = torch.cat([joined @ part for part in _tables(tried, rows, p, unit)], 1).double()
    scale, below = (v.expand(costs.shape) for v in _columns(tried, unit))
    return Scan(costs + error(ends, scale, spec.qmin + below, spec, p), tried, samples, unit, step)


def _scan_values(values: Tensor, width: Tensor, spec: QuantSpec, p: float) -> Scan:
    unit, count = width.clamp(min=TINY), values.shape[1]
    unit = torch.exp2(unit.log2().ceil()) if spec.power_of_two else unit
    samples = Samples.of_values(values * unit.reciprocal().float().unsqueeze(1), spec)
    levels, step = spec.qmax - spec.qmin, 0.05 if count >= SMOOTH else 0.025
    least = max(LEAST, 1 - (count ** (1 / p) + 1) / levels)  # as in kept.py
    tried, rows = pairs(levels, (1.0, least), step, spec.power_of_two), min(_rows(levels), ROWS)
    index = (samples.points.float() * (rows / 2 * (1 - 2.0**-20))).add_(rows / 2).to(torch.int32)
    costs = torch.cat([embedding_bag(index, part, mode="sum") for part in _tables(tried, rows, p, unit)], 1)
    return Scan(costs, tried, samples, unit, step)


def _look_closer(scan: Scan, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """The best scale and number of levels below zero, (channels,), around the best of a scan."""
    levels = spec.qmax - spec.qmin
    found = scan.costs.topk(LOOKS[0][0], 1, largest=False).indices.sort(1).values
    scale, below = (v[found] for v in _columns(scan.tried, scan.unit))
    spread = 0.0 if spec.power_of_two else scan.step
    shifts = torch.tensor([0.0, -1.0, 1.0] if levels >= ZERO_POINTS else [0.0], device=scale.device)
    for count, around in LOOKS:
        near = 1 + spread * torch.tensor(around, dtype=torch.float64, device=scale.device)
        some, under = neighbours(scale[:, :count], below[:, :count], near, shifts, (0, levels))
        costs = error(scan.samples, some, spec.qmin + under, spec, p)
        best = costs.topk(min(LOOKS[-1][0], costs.shape[1]), 1, largest=False).indices
        scale, below = some.gather(1, best), under.gather(1, best)
    return scale.squeeze(1), below.squeeze(1)


def _rows(levels: int) -> int:
    return 1 << max(10, (ROWS_PER_STEP * levels - 1).bit_length())


def _tables(tried: tuple[Candidate, ...], rows: int, p: float, like: Tensor) -> Iterator[Tensor]:
    """Tables of the cost of a value in each row for each candidate, some candidates at a time."""
    for k in range(0, len(tried), COLUMNS):
        yield cost_table(p, rows, tried[k : k + COLUMNS]).to(like.device)


def _columns(tried: tuple[Candidate, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """Scales, and levels below zero, of all candidates."""
    scale, below = torch.tensor([(s, -low) for s, low, _ in tried], dtype=torch.float64, device=like.device).unbind(1)
    return scale, below


@lru_cache(maxsize=16)
def pairs(levels: int, between: tuple[float, float], step: float, power_of_two: bool) -> tuple[Candidate, ...]:
    """Scale, lowest and highest level to try, for spans from the widest to the least."""
    spans, least = [between[0]], between[1]
    while spans[-1] > least:
        spans.append(spans[-1] * (1 - step))
        step = min(0.3, step * (GROWTH if spans[-1] < 0.2 else 1.0))
    scales = [span / levels for span in spans]
    if power_of_two:
        scales = [2.0**-k for k in range(16)]
    apart = -(-(levels + 1) // ZERO_POINTS)
    below = sorted({*range(0, levels + 1, apart), levels})
    return tuple((scale, -a, levels - a) for scale in scales for a in below)
