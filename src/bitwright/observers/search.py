"""The range with the least quantization error, on kept values or on a histogram, all channels at once.

A wide scan finds where the error is small, finer ones around its best find the least. Three ways, by the data:

- few values: their error has many dips, so the scan is dense and on the values themselves (``search_few.py``);
- a symmetric spec has one free end, and all channels try the same candidates (``tables.py``);
- an affine spec has two: both shrink together, or the magnitude is cut, then each end moves by its own.
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.numerics import scale_and_zero_point
from bitwright.observers.samples import Samples, error, split_ends
from bitwright.observers.search_few import FEW, search_few
from bitwright.observers.search_kept import search_kept
from bitwright.observers.streaming import StreamingHistogram
from bitwright.observers.tables import shared_errors
from bitwright.spec import PerTensor, QuantSpec

AT_ONCE = 1 << 21  # values or bins per group of channels
COARSE, STEPS = 0.9, 60  # the first scan: 1, 0.9, 0.81, … of the histogram's span
FINE, AROUND = 32, 32  # parts of a coarse step, and how many to try on either side of its best
VERY_FEW = 48  # values per channel, of which each counts too much to be taken from a table
JUDGED = 1 << 15  # values times candidates, when kept values judge
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
    values = histogram.exact()
    size = histogram.bins if values is None or values.shape[1] > FEW else values.shape[1]
    parts = []
    for part in histogram.split(max(1, AT_ONCE // size)):
        values = part.exact()
        if values is not None and spec.symmetric and values.shape[1] > VERY_FEW:
            parts.append(search_kept(values, *part.range(), spec, p))
        elif values is not None and values.shape[1] <= FEW:
            parts.append(search_few(values, spec, p))
        else:
            parts.append((_symmetric if spec.symmetric else _affine)(part, spec, p))
    lows, highs = zip(*parts, strict=True)
    return torch.cat(lows), torch.cat(highs)


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
    values = histogram.exact()
    if values is None or (spec.qmax - spec.qmin) * BINS_PER_STEP <= histogram.bins:
        top = tops.gather(1, fine.argmin(1, keepdim=True))
    else:
        some = min(len(near), max(6, JUDGED // values.shape[1]))
        top = _judged(values, tops.gather(1, fine.topk(some, 1, largest=False).indices), reach, spec, p)
    return torch.maximum(lo, -top).clamp(max=0.0).squeeze(1), torch.minimum(hi, top).clamp(min=0.0).squeeze(1)


def _judged(values: Tensor, tops: Tensor, reach: Tensor, spec: QuantSpec, p: float) -> Tensor:
    """The best of some candidates (channels, candidates) by the values themselves, and then of its neighbourhood."""
    samples = Samples.of_values(values, spec)
    closer = COARSE ** (torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64, device=tops.device) / FINE / 4)
    for part in (1.0, closer):
        tops = (tops * part).minimum(reach)
        costs = error(samples, *scale_and_zero_point(-tops, tops, spec), spec, p)
        tops = tops.gather(1, costs.argmin(1, keepdim=True))
    return tops


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
    return (low * unit.unsqueeze(1)).squeeze(1), (high * unit.unsqueeze(1)).squeeze(1)
