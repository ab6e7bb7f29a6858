"""The range with the least quantization error, on kept values or on a histogram, all channels at once.

The data and the spec decide which search is used:

- very few values, or few with many levels and an affine spec: a dense scan of their own errors (``few.py``);
- kept values and a symmetric spec: tables of what a value costs (``kept.py``);
- few levels and an affine spec: every scale with every zero point (``affine.py``);
- bins and a symmetric spec: all channels try the same candidates, a wide scan and a finer one around its best;
- many levels and an affine spec: both ends shrink together, or the magnitude is cut, then each end moves separately;
- fp8: on the numbers of its grid (``floating.py``).
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.numerics import scale_and_zero_point
from bitwright.observers.search.affine import MOST_LEVELS, search_affine
from bitwright.observers.search.few import FEW, search_few
from bitwright.observers.search.floating import search_floating
from bitwright.observers.search.kept import search_kept
from bitwright.observers.search.samples import Samples, error, neighbours, split_ends
from bitwright.observers.search.tables import shared_errors
from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.spec import PerTensor, QuantSpec

AT_ONCE = 1 << 21  # values or bins per group of channels
COARSE, STEPS = 0.9, 60  # the first scan: 1, 0.9, 0.81, … of the histogram's span
FINE, AROUND = 32, 32  # parts of a coarse step, and how many to try on either side of its best
WIDE = 1 << 9  # levels, for which no table tells where in a step a value lies
VERY_FEW = 48  # values per channel: each counts too much to be taken from a table
MANY = 1024  # values per channel, for which it makes no difference where in a bin each of them lies
BINS_PER_STEP = 64  # with fewer, where a value lies in its bin makes a difference


def check_power(p: float) -> float:
    """Return ``p`` if errors can be raised to it."""
    if not p > 0:
        raise ConfigError(f"p, the power of the error, must be above 0, not {p}")
    return float(p)


def least_error_range(histogram: StreamingHistogram, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """The range (channels,) and (channels,) with the least error."""
    spec = spec.with_(granularity=PerTensor())  # channels are rows here, whatever made them
    if spec.format.floating:
        return search_floating(histogram, spec, p)
    values = histogram.exact()
    count = histogram.bins if values is None else values.shape[1]
    parts = histogram.split(max(1, AT_ONCE // count // (1 if spec.symmetric else 4)))
    lows, highs = zip(*(_search(part, spec, p) for part in parts), strict=True)
    return torch.cat(lows), torch.cat(highs)


def _search(part: StreamingHistogram, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """Search some channels with the search that fits them."""
    values = part.exact()
    tabled = spec.qmax - spec.qmin <= (WIDE if spec.symmetric else MOST_LEVELS)
    if values is not None and values.shape[1] <= (VERY_FEW if tabled else FEW):
        return search_few(values, spec, p)
    if not spec.symmetric:
        return (search_affine if tabled else _affine)(part, spec, p)
    return _symmetric(part, spec, p) if values is None else search_kept(values, *part.range(), spec, p)


def _symmetric(histogram: StreamingHistogram, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    counts, ends, unit = split_ends(histogram)
    lo, hi = (v.double().unsqueeze(1) for v in histogram.range())
    reach = (torch.maximum(-lo, hi) if spec.format.signed else hi).clamp(min=0.0)

    def costs(rows: Tensor | slice, tops: list[float]) -> Tensor:
        return shared_errors(counts[rows], tuple(tops), spec, p)

    def of_ends(tops: Tensor) -> Tensor:
        tops = tops.minimum(reach / unit.unsqueeze(1))
        return error(ends, *scale_and_zero_point(-tops, tops, spec), spec, p)

    scan = [COARSE**i for i in range(STEPS)]
    tops = torch.tensor(scan, dtype=torch.float64, device=lo.device)
    coarse = (costs(slice(None), scan) + of_ends(tops)).argmin(1)
    near = [i / FINE for i in range(-AROUND, AROUND + 1)]
    fine = counts.new_empty(len(counts), len(near), dtype=torch.float64)
    for bucket in coarse.unique().tolist():
        rows = (coarse == bucket).nonzero().squeeze(1)
        fine[rows] = costs(rows, [COARSE ** (bucket + part) for part in near])
    tops = COARSE ** (coarse.unsqueeze(1) + torch.tensor(near, dtype=torch.float64, device=lo.device))
    fine += of_ends(tops)
    tops = (tops * unit.unsqueeze(1)).minimum(reach)  # (channels, candidates)
    top = tops.gather(1, fine.argmin(1, keepdim=True))
    return torch.maximum(lo, -top).clamp(max=0.0).squeeze(1), torch.minimum(hi, top).clamp(min=0.0).squeeze(1)


def _affine(histogram: StreamingHistogram, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    counts, ends, unit = split_ends(histogram)
    lo, hi = (v.double().unsqueeze(1) / unit.unsqueeze(1) for v in histogram.range())
    lo, hi = lo.clamp(max=0.0), hi.clamp(min=0.0)
    levels = spec.qmax - spec.qmin + 1
    coarse = Samples.of_bins(counts, ends, spec, max(1024, 2 * levels))
    values = histogram.exact()
    if values is not None and (values.shape[1] <= MANY or levels * BINS_PER_STEP > histogram.bins):
        fine = Samples.of_values(values / unit.unsqueeze(1), spec)
    else:
        fine = Samples.of_bins(counts, ends, spec, max(2048, 8 * levels))

    def best(samples: Samples, lows: Tensor, highs: Tensor) -> tuple[Tensor, Tensor]:
        lows, highs = torch.broadcast_tensors(lows.clamp(min=lo), highs.clamp(max=hi))
        at = error(samples, *scale_and_zero_point(lows, highs, spec), spec, p).argmin(1, keepdim=True)
        return lows.gather(1, at), highs.gather(1, at)

    def factors(step: float, first: int, last: int) -> Tensor:
        return step ** torch.arange(first, last + 1, dtype=torch.float64, device=lo.device)

    shrink, sparse = factors(0.85, 0, 36), factors(0.75, 0, 12)
    reach = torch.maximum(-lo, hi) * shrink
    no_low, no_high = torch.where(hi > 0, 0.0, lo), torch.where(lo < 0, 0.0, hi)  # all for the other side
    low, high = best(
        coarse,
        torch.cat([lo * shrink, torch.maximum(lo, -reach), no_low.expand(-1, 13), lo * sparse], 1),
        torch.cat([hi * shrink, torch.minimum(hi, reach), hi * sparse, no_high.expand(-1, 13)], 1),
    )
    for samples, step, count in (
        (coarse, 0.9, 6),
        (coarse, 0.9, 4),
        (fine, 0.97, 3),
        (fine, 0.99, 3),
        (fine, 0.997, 2),
    ):
        around = factors(step, -count, count)
        low, high = best(samples, low, high * around)
        low, high = best(samples, low * around, high)
        if step > COARSE:
            low, high = best(samples, low * around, high * around)
    if values is not None and values.shape[1] <= MANY and not spec.power_of_two:
        low, high = _closer(fine, low, high, spec, p)
    return (low * unit.unsqueeze(1)).squeeze(1), (high * unit.unsqueeze(1)).squeeze(1)


def _closer(samples: Samples, low: Tensor, high: Tensor, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """The best of scales and zero points around those of [low, high]: the error of few values has many dips."""
    scale, zero_point = (v.double() for v in scale_and_zero_point(low, high, spec))
    shifts = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64, device=low.device)
    for reach, count in ((0.015, 31), (0.0008, 7)):
        near = 1 + torch.linspace(-reach, reach, count, dtype=torch.float64, device=low.device)
        scales, zeros = neighbours(scale, zero_point, near, shifts, (spec.qmin, spec.qmax))
        best = error(samples, scales, zeros, spec, p).argmin(1, keepdim=True)
        scale, zero_point = scales.gather(1, best), zeros.gather(1, best)
    return (spec.qmin - zero_point) * scale, (spec.qmax - zero_point) * scale
