"""The affine range with the least error for formats of few levels: every scale with every zero point.

A grid of a scale s with a levels below zero reaches from -a·s to (levels - a)·s. In units of a channel's range (or, for
bins, of their span) all channels try the same pairs (s, a): a table tells what a value costs with each of them, and a
channel's errors are the sum of its values' rows, or the product of its counts with the table (``tables.py``). Around
the best pairs the scale is then searched on the values or bins themselves.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from bitwright.observers.search.samples import Samples, error, split_ends
from bitwright.observers.search.tables import COLUMNS, TINY, Candidate, cost_table
from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.spec import QuantSpec

MOST_LEVELS = 63
ZERO_POINTS = 32  # to try in the scan
ROWS, ROWS_PER_STEP = 1 << 13, 64  # of a table, at most and if possible
SMOOTH = 1024  # values, whose error has few dips
LEAST, GROWTH = 0.003, 1.1  # the least part of the range to try, and by how much steps grow below a fifth of it
LOOKS = ((3, (-0.6, -0.3, 0.0, 0.3, 0.6)), (1, (-0.2, -0.1, 0.0, 0.1, 0.2)))  # how many, and where between neighbours


def search_affine(histogram: StreamingHistogram, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """The range (channels,) and (channels,) with the least error."""
    lo, hi = (v.double() for v in histogram.range())
    levels, values = spec.qmax - spec.qmin, histogram.exact()
    width = hi.clamp(min=0.0) - lo.clamp(max=0.0)
    if values is None:
        counts, ends, unit = split_ends(histogram)
        samples = Samples.of_bins(counts, ends, spec, max(2048, ROWS_PER_STEP * levels))
        widest, step, least = 2.0, 0.05, LEAST
    else:
        counts, ends, unit = None, None, width.clamp(min=TINY)
        unit = torch.exp2(unit.log2().ceil()) if spec.power_of_two else unit
        samples = Samples.of_values(values * unit.reciprocal().float().unsqueeze(1), spec)
        widest, step = 1.0, 0.05 if values.shape[1] >= SMOOTH else 0.025
        least = max(LEAST, 1 - (values.shape[1] ** (1 / p) + 1) / levels)  # as in kept.py
    tried = pairs(levels, (widest, least), step, spec.power_of_two)
    rows = min(1 << max(10, (ROWS_PER_STEP * levels - 1).bit_length()), ROWS if values is not None else histogram.bins)
    scale, below = torch.tensor([(s, -low) for s, low, _ in tried], dtype=torch.float64, device=unit.device).unbind(1)
    parts = [cost_table(p, rows, tried[k : k + COLUMNS]).to(unit.device) for k in range(0, len(tried), COLUMNS)]
    if counts is not None and ends is not None:
        costs = torch.cat([counts.view(len(counts), rows, -1).sum(2) @ part for part in parts], 1).double()
        shape = (len(unit), len(tried))
        costs += error(ends, scale.expand(shape), (spec.qmin + below).expand(shape), spec, p)
    else:
        index = (samples.points.float() * (rows / 2 * (1 - 2.0**-20))).add_(rows / 2).to(torch.int32)
        costs = torch.cat([embedding_bag(index, part, mode="sum") for part in parts], 1)
    found = costs.topk(LOOKS[0][0], 1, largest=False).indices.sort(1).values
    scale, below, spread = scale[found], below[found], 0.0 if spec.power_of_two else step
    shifts = torch.tensor([0.0, -1.0, 1.0] if levels >= ZERO_POINTS else [0.0], device=unit.device)
    for count, around in LOOKS:
        near = 1 + spread * torch.tensor(around, dtype=torch.float64, device=unit.device)
        some, under = scale[:, :count, None, None] * near[:, None], below[:, :count, None, None] + shifts
        some, under = (v.flatten(1) for v in torch.broadcast_tensors(some, under.clamp(0, levels)))
        costs = error(samples, some, spec.qmin + under, spec, p)
        best = costs.topk(min(LOOKS[-1][0], costs.shape[1]), 1, largest=False).indices
        scale, below = some.gather(1, best), under.gather(1, best)
    size = (scale.squeeze(1) * unit).where(width > 0, 0.0)
    below = below.squeeze(1)
    return (-below * size).float(), ((levels - below) * size).float()


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
