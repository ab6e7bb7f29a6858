"""KLObserver: the threshold that loses the least information (entropy calibration, Migacz 2017).

Of the histogram h of |x|, the first i bins are held. P is h with all beyond added to bin i - 1; Q is h merged into the
format's levels, each level spread evenly over its nonzero bins; both normalised. The i with the least

    KL(P || Q) = sum of P·log(P / Q)

is chosen, among those that hold at least half of the values. Summed by levels, this needs only the running sums of h,
of h·log h and of the nonzero bins at the borders of levels: no loop over bins. Zero is exact with any scale, so its
bin counts no more than its neighbour. Where the tail falls into a level without values, Q has half a value there.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitwright.observers.base import register_observer
from bitwright.observers.histogram_base import HistogramBase
from bitwright.observers.streaming import StreamingHistogram
from bitwright.spec import QuantSpec

BINS = 2048  # half of them for magnitudes
CACHED = 1 << 14  # values per intermediate tensor


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
    magnitude = histogram.folded()
    counts, width = magnitude.counts()
    counts = counts[:, histogram.bins // 2 :].double()
    highest = magnitude.range()[1]
    counts[:, 0] = torch.minimum(counts[:, 0], counts[:, 1])
    used = (highest.double() / width).floor().long().clamp(max=counts.shape[1] - 1) + 1
    first, last = max(levels, counts.shape[1] // 16), int(used.amax())
    if first >= last:
        return highest
    tried = torch.arange(first, last + 1, device=used.device)
    wide = max(1, CACHED // (levels + 1))
    costs = torch.cat([divergence(part, tried, levels) for part in counts.split(wide)])
    costs = torch.where(tried <= used.unsqueeze(1), costs, torch.inf)
    best = first + costs.argmin(1)
    return torch.where(best >= used, highest, (best * width).to(highest))


def divergence(counts: Tensor, held: Tensor, levels: int) -> Tensor:
    """KL(P || Q) of (channels, bins) counts for each number of ``held`` bins: (channels, candidates)."""
    total = counts.sum(1, keepdim=True)
    sums, fills, logs = (pad(v.cumsum(1), (1, 0)) for v in (counts, (counts > 0).double(), counts.xlogy(counts)))
    inside, last = sums[:, held], counts[:, held - 1]
    tail = total - inside
    empty = ((last == 0) & (tail > 0)).double()  # the tail lies in a bin that held nothing
    within, at_last = torch.empty_like(inside), torch.empty_like(inside)  # sum of h·log q, and log q of the last level
    step = max(1, CACHED // (levels + 1) // len(counts))
    for k in range(0, len(held), step):
        at = slice(k, k + step)
        borders = (torch.arange(levels + 1, device=held.device) * held[at].unsqueeze(1) + levels // 2) // levels
        mass, filled = (v[:, borders].diff(dim=2) for v in (sums, fills))  # (channels, candidates', levels)
        filled[:, :, -1] += empty[:, at]
        log_q = (mass.clamp(min=0.5) / filled.clamp(min=1)).log_()
        within[:, at], at_last[:, at] = (mass * log_q).sum(2), log_q[:, :, -1]
    gain = logs[:, held] - last.xlogy(last) + (last + tail).xlogy(last + tail) - within - tail * at_last
    return torch.where(inside * 2 >= total, gain / total + torch.log(inside / total), torch.inf)
