"""The threshold that loses the least information (entropy calibration, Migacz 2017).

Of the histogram h of |x|, the first i bins are held. P is h with all beyond added to bin i - 1; Q is h merged into the
format's levels, each level spread evenly over its nonzero bins; both normalised. The search takes the i with the least

    KL(P || Q) = sum of P·log(P / Q)

among those that hold at least half of the values (``divergence.py``). Zero is exact with any scale, so its bin counts
no more than its neighbour. Where the tail falls into a level without values, Q has half a value there. Where values are
few, bins are joined until there are about ``PER_BIN`` in each, but no fewer than ``LEAST_PER_LEVEL`` for each level.
"""

import torch
from torch import Tensor

from bitwright.observers.search.divergence import Divergence
from bitwright.observers.state.streaming import StreamingHistogram

PER_BIN = 8  # values, on average: with fewer, bins are joined
LEAST_PER_LEVEL = 4  # bins, however few values there are
AT_ONCE = 1 << 17  # bins per group of channels
DIGITS = 11  # of a loss, beyond which it is rounding
SMALL = 32  # levels; with fewer, all cuts are tried at once
SCAN = 16  # distance of cuts in the first scan; its best tells which of the others cannot be the best


def least_divergence(
    histogram: StreamingHistogram, levels: int, start: float | None = None, step: float = 0.0
) -> Tensor:
    """Return the threshold (channels,) of least divergence.

    Args:
        histogram: of values or of magnitudes.
        levels: the format's levels for magnitudes; with at most as many bins, nothing is cut.
        start: the lowest threshold to try, as a share of the largest magnitude; by default 1/16 of the bins.
        step: the distance between thresholds, as a share of the largest magnitude; 0 tries the end of every bin.
    """
    parts = histogram.split(max(1, AT_ONCE // histogram.bins))
    return torch.cat([_best_cut(part.folded(), levels, start, step) for part in parts])


def _best_cut(magnitude: StreamingHistogram, levels: int, start: float | None, step: float) -> Tensor:
    """Where to cut each channel of a histogram of magnitudes; tries every cut that may be the best."""
    highest = magnitude.range()[1]
    few = 1 << max(0, (magnitude.values // PER_BIN).bit_length() - 1)
    bins = min(magnitude.bins // 2, max(few, 1 << (LEAST_PER_LEVEL * levels - 1).bit_length()))
    counts, width = magnitude.counts(2 * bins)
    counts = counts[:, bins:].clone()
    counts[:, 0] = torch.minimum(counts[:, 0], counts[:, 1])
    used = ((highest.double() / width).floor().long().clamp(max=bins - 1) + 1).unsqueeze(1)
    last = int(used.amax())
    first = max(levels, bins // 16 if start is None else int(start * int(used.amin())))
    if first >= last:
        return highest
    cuts = torch.arange(first, last + 1, max(1, int(step * last)), device=used.device)
    costs = _costs(Divergence(counts, levels), cuts, (cuts >= (start or 0) * used) & (cuts <= used))
    # The first of equal ones, rounding aside.
    least, place = costs.round(decimals=DIGITS).min(1)
    found = cuts[place]
    return torch.where((found >= used.squeeze(1)) | least.isinf(), highest, (found * width).to(highest))


def _costs(losses: Divergence, cuts: Tensor, allowed: Tensor) -> Tensor:
    """The divergences (channels, cuts), infinite for those that cannot be the least."""
    costs = torch.full(allowed.shape, torch.inf, dtype=torch.float64, device=cuts.device)
    scan = cuts % SCAN == 0 if losses.levels > SMALL else cuts > 0
    costs[:, scan] = losses.at(cuts[scan])
    costs.masked_fill_(~allowed, torch.inf)
    if losses.levels > SMALL:
        promising = allowed & (losses.least(cuts) < costs.amin(1, keepdim=True))
        others = (~scan & promising.any(0)).nonzero().squeeze(1)
        costs[:, others] = losses.at(cuts[others]).masked_fill_(~allowed[:, others], torch.inf)
    return costs
