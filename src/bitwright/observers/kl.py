"""KLObserver: the threshold that loses the least information (entropy calibration, Migacz 2017).

Of the histogram h of |x|, the first i bins are held. P is h with all beyond added to bin i - 1; Q is h merged into the
format's levels, each level spread evenly over its nonzero bins; both normalised. The i with the least

    KL(P || Q) = sum of P·log(P / Q)

is chosen, among those that hold at least half of the values. Summed by levels, this needs only the running sums of h,
of h·log h and of the nonzero bins at the borders of levels: no loop over bins. Zero is exact with any scale, so its
bin counts no more than its neighbour. Where the tail falls into a level without values, Q has half a value there.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitwright.observers.base import register_observer
from bitwright.observers.histogram_base import HistogramBase
from bitwright.observers.streaming import StreamingHistogram
from bitwright.spec import QuantSpec

BINS = 2048  # half of them for magnitudes
CACHED = 1 << 15  # values per intermediate tensor
AT_ONCE = 1 << 17  # bins per group of channels
DIGITS = 11  # of a loss, beyond which it is rounding
SMOOTH = 32  # levels; above, the loss of neighbouring cuts differs too much to leave any out
SCAN, LOOKS = 0.01, 5  # distance of cuts in the first scan, and how many of its best to look closer at


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
    parts = histogram.split(max(1, AT_ONCE // histogram.bins))
    return torch.cat([_best_cut(part.folded(), levels) for part in parts])


def _best_cut(magnitude: StreamingHistogram, levels: int) -> Tensor:
    """Where to cut each channel of a histogram of magnitudes: a scan of about 1 % steps, then between its best."""
    counts, width = magnitude.counts()
    counts = counts[:, magnitude.bins // 2 :].double()
    highest = magnitude.range()[1]
    counts[:, 0] = torch.minimum(counts[:, 0], counts[:, 1])
    used = ((highest.double() / width).floor().long().clamp(max=counts.shape[1] - 1) + 1).unsqueeze(1)
    first, last = max(levels, counts.shape[1] // 16), counts.shape[1]
    if first >= int(used.amax()):
        return highest
    losses = Losses(counts, levels)

    def best(held: Tensor, keep: int) -> Tensor:
        """The best cuts (channels, keep) of some (candidates,) or (channels, candidates)."""
        shared = held.ndim == 1
        own = held.expand(len(counts), -1) if shared else held.clamp(min=first).minimum(used.clamp(min=first))
        costs = torch.where(own <= used, losses.at(held if shared else own), torch.inf)
        order = costs.round(decimals=DIGITS).argsort(dim=1, stable=True)  # the first of equal ones, rounding aside
        return own.gather(1, order[:, :keep])

    steps = torch.arange(math.ceil(math.log(last / first) / math.log1p(SCAN)) + 1, device=used.device)
    scan = (first * (1 + SCAN) ** steps.double()).round().long().clamp(max=last).unique()
    if levels > SMOOTH:
        scan = torch.arange(first, last + 1, device=used.device)
    found = torch.cat([best(scan, LOOKS), used], 1)
    around = torch.tensor([-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9], dtype=torch.float64, device=used.device) * SCAN
    found = best((found.unsqueeze(2) * (1 + around)).round().long().flatten(1), 1)
    found = best(found + torch.arange(-3, 4, device=used.device), 1)
    return torch.where(found >= used, highest.unsqueeze(1), (found * width.unsqueeze(1)).to(highest)).squeeze(1)


class Losses:
    """KL(P || Q) of (channels, bins) counts for any number of held bins.

    Args:
        counts: how often each magnitude comes, in float64.
        levels: the format's levels for magnitudes.
    """

    def __init__(self, counts: Tensor, levels: int) -> None:
        self.counts, self.levels = counts, levels
        self.sums, self.fills, self.logs = (
            pad(v.cumsum(1), (1, 0)) for v in (counts, (counts > 0).double(), counts.xlogy(counts))
        )
        self._sums_by_bin, self._fills_by_bin = (v.t().contiguous() for v in (self.sums, self.fills))

    def at(self, held: Tensor) -> Tensor:
        """The loss (channels, candidates) of cuts after ``held`` bins: (candidates,), or (channels, candidates)."""
        shared = held.ndim == 1
        own = held.expand(len(self.counts), -1) if shared else held
        total, inside = self.sums[:, -1:], self.sums.gather(1, own)
        last, tail = self.counts.gather(1, own - 1), total - inside
        empty = ((last == 0) & (tail > 0)).double()  # the tail lies in a bin that held nothing
        within, at_last = torch.empty_like(inside), torch.empty_like(inside)
        step = max(1, CACHED // (self.levels + 1) // len(self.counts))
        for k in range(0, held.shape[-1], step):
            at = (slice(None), slice(k, k + step))
            within[at], at_last[at] = self._levels(held[k : k + step] if shared else held[at], empty[at])
        gain = self.logs.gather(1, own) - last.xlogy(last) + (last + tail).xlogy(last + tail) - within - tail * at_last
        return torch.where(inside * 2 >= total, gain / total + torch.log(inside / total), torch.inf)

    def _levels(self, held: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of h·log q over all levels, and log q of the last level."""
        borders = torch.arange(self.levels + 1, device=held.device) * held.unsqueeze(-1) + self.levels // 2
        borders = borders // self.levels
        if held.ndim == 1:  # rows of all channels: (candidates, levels + 1, channels)
            mass, filled = (
                v.index_select(0, borders.view(-1)).view(*borders.shape, -1).diff(dim=1)
                for v in (self._sums_by_bin, self._fills_by_bin)
            )
            filled[:, -1] += empty.t()
            log_q = (mass.clamp(min=0.5) / filled.clamp_(min=1)).log_()
            return mass.mul_(log_q).sum(1).t(), log_q[:, -1].t()
        mass, filled = (
            v.gather(1, borders.flatten(1)).view(borders.shape).diff(dim=2) for v in (self.sums, self.fills)
        )
        filled[:, :, -1] += empty
        log_q = (mass.clamp(min=0.5) / filled.clamp_(min=1)).log_()
        return mass.mul_(log_q).sum(2), log_q[:, :, -1]
