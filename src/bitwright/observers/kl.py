"""KLObserver: the threshold that loses the least information (entropy calibration, Migacz 2017).

Of the histogram h of |x|, the first i bins are held. P is h with all beyond added to bin i - 1; Q is h merged into the
format's levels, each level spread evenly over its nonzero bins; both normalised. The i with the least

    KL(P || Q) = sum of P·log(P / Q)

is chosen, among those that hold at least half of the values (``divergence.py``). Zero is exact with any scale, so its
bin counts no more than its neighbour. Where the tail falls into a level without values, Q has half a value there.
Where values are few, bins are joined until there are about ``PER_BIN`` in each, but no fewer than
``LEAST_PER_LEVEL`` for each level.
"""

import torch
from torch import Tensor

from bitwright.observers.base import register_observer
from bitwright.observers.divergence import Divergence
from bitwright.observers.histogram_base import HistogramBase
from bitwright.observers.search_floating import refuse_floating
from bitwright.observers.streaming import StreamingHistogram
from bitwright.spec import QuantSpec

BINS = 2048  # half of them for magnitudes
PER_BIN = 8  # values, on average: with fewer, bins are joined
LEAST_PER_LEVEL = 4  # bins, however few values there are
AT_ONCE = 1 << 17  # bins per group of channels
DIGITS = 11  # of a loss, beyond which it is rounding
SMALL = 32  # levels; with fewer, all cuts are tried at once
SCAN = 16  # distance of cuts in the first scan; its best tells which of the others cannot be the best


@register_observer("KLObserver", aliases=("kl", "KL", "kl_histogram", "KL_HISTOGRAM", "entropy"))
class KLObserver(HistogramBase):
    """Threshold of least Kullback-Leibler divergence; the order of batches does not matter.

    Affine specs cut both ends at the threshold, and give all levels to one side if the data has only one.
    Where the format has as many levels as the histogram has bins of magnitudes, nothing is cut.

    Args:
        spec: what the range is for.
        bins: bins per channel, a power of two; half of them serve the magnitudes.
    """

    def __init__(self, spec: QuantSpec, bins: int = BINS) -> None:
        super().__init__(spec, bins)
        refuse_floating("KLObserver", spec)

    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        """The range cut at the threshold."""
        lo, hi = histogram.range()
        levels = self.spec.qmax - self.spec.qmin + 1
        one_sided = (lo >= 0) | (hi <= 0)
        if self.spec.symmetric:
            clip = _threshold(histogram, self.spec.qmax + 1)
        elif bool(one_sided.all()):
            clip = _threshold(histogram, levels)
        elif not bool(one_sided.any()):
            clip = _threshold(histogram, max(1, levels // 2))
        else:
            clip = torch.where(one_sided, _threshold(histogram, levels), _threshold(histogram, max(1, levels // 2)))
        return torch.maximum(lo, -clip), torch.minimum(hi, clip)


def _threshold(histogram: StreamingHistogram, levels: int) -> Tensor:
    parts = histogram.split(max(1, AT_ONCE // histogram.bins))
    return torch.cat([_best_cut(part.folded(), levels) for part in parts])


def _best_cut(magnitude: StreamingHistogram, levels: int) -> Tensor:
    """Where to cut each channel of a histogram of magnitudes: every cut that may be the best is tried."""
    highest = magnitude.range()[1]
    count = magnitude.values
    few = 1 << max(0, (count // PER_BIN).bit_length() - 1)
    bins = min(magnitude.bins // 2, max(few, 1 << (LEAST_PER_LEVEL * levels - 1).bit_length()))
    counts, width = magnitude.counts(2 * bins)
    counts = counts[:, bins:].clone()
    counts[:, 0] = torch.minimum(counts[:, 0], counts[:, 1])
    used = (highest.double() / width).floor().long().clamp(max=bins - 1) + 1
    first, last = max(levels, bins // 16), int(used.amax())
    if first >= last:
        return highest
    losses = Divergence(counts, levels)
    cuts = torch.arange(first, last + 1, device=used.device)
    costs = torch.full((len(counts), len(cuts)), torch.inf, dtype=torch.float64, device=used.device)
    scan = cuts % SCAN == 0 if levels > SMALL else cuts > 0
    costs[:, scan] = losses.at(cuts[scan])
    if levels > SMALL:
        others = (~scan & (losses.least(cuts) < costs.amin(1, keepdim=True)).any(0)).nonzero().squeeze(1)
        costs[:, others] = losses.at(cuts[others])
    costs.masked_fill_(cuts > used.unsqueeze(1), torch.inf)
    # The first of equal ones, rounding aside.
    found = cuts[costs.round(decimals=DIGITS).min(1).indices]
    return torch.where(found >= used, highest, (found * width).to(highest))
