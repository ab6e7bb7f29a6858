"""KL(P || Q) of histograms of magnitudes for cuts after any number of bins: what the entropy calibration minimises.

With h the counts, N their sum, and for a cut after i bins the sum S of those held and the tail T = N - S,

    KL = [sum of h·log h, with the tail in bin i - 1 - sum over levels of m·log(m / f) - T·log q] / N + log(S / N)

m is what a level holds, f how many of its bins are filled and q = m / f of the last level. All are differences of
running sums at the borders of levels: no loop over bins. Both running sums are packed into one integer, and where
these are few, m·log(m / f) is looked up.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

CACHED = 1 << 17  # values per intermediate tensor
LOOKED_UP = 1 << 18  # entries of a table, at most


class Divergence:
    """KL(P || Q) for cuts that all channels share; ``counts`` of magnitudes are integers, (channels, bins)."""

    def __init__(self, counts: Tensor, levels: int) -> None:
        self.counts, self.levels = counts.t().double().contiguous(), levels  # (bins, channels)
        self.sums, self.logs = (_running(v) for v in (self.counts, self.counts.xlogy(self.counts)))
        self.shift = (counts.shape[1] // levels + 2).bit_length()
        filled, most = (counts > 0).t(), int(self.sums[-1].max())
        self.packed = _running((counts.t() << self.shift) + filled)
        entries = 1 << (((most + 1) << self.shift) - 1).bit_length()
        self.table: Tensor | None = None
        if entries <= LOOKED_UP:
            self.packed = self.packed.int()
            self.table = _table(entries, self.shift).to(counts.device)

    def at(self, held: Tensor) -> Tensor:
        """The divergences (channels, cuts) of cuts after ``held`` bins; infinite where they hold less than half."""
        inside, tail, last, log_q, more = self._last(held)
        total = self.sums[-1]
        cost = torch.empty_like(inside)
        step = max(1, CACHED // (self.levels + 1) // self.counts.shape[1])
        for k in range(0, len(held), step):
            cost[k : k + step] = self._cost(self._keys(held[k : k + step])).sum(1)
        cost -= more
        gain = self.logs[held] - last.xlogy(last) + (last + tail).xlogy(last + tail) - cost - tail * log_q
        return torch.where(inside * 2 >= total, gain / total + torch.log(inside / total), torch.inf).t()

    def least(self, held: Tensor) -> Tensor:
        """What the divergences (channels, cuts) cannot be below: that of two events, the last bin and all others."""
        inside, tail, last, log_q, _ = self._last(held)
        p = (last + tail) / self.sums[-1]
        q = (log_q.exp() / inside).clamp(1e-12, 1 - 1e-12)
        bound = p.xlogy(p / q) + (1 - p).xlogy((1 - p) / (1 - q)) - torch.log1p(0.5 / inside)
        return torch.where(inside * 2 >= self.sums[-1], bound, torch.inf).t()

    def _last(self, held: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What is held, the tail, the last bin, log q of the last level, and what this loses: (cuts, channels).

        A last bin that is empty but for the tail counts as filled: its level is spread over one bin more.
        """
        inside, last = self.sums[held], self.counts[held - 1]
        tail = self.sums[-1] - inside
        mass, filled = _unpack(self.packed[held] - self.packed[self._border(held, self.levels - 1)], self.shift)
        spread = (filled + ((last == 0) & (tail > 0))).clamp_(min=1)
        more = mass * (spread / filled.clamp(min=1)).log_() if bool((spread > filled).any()) else torch.zeros_like(mass)
        return inside, tail, last, torch.log(mass.clamp(min=0.5) / spread), more

    def _border(self, held: Tensor, level: int | Tensor) -> Tensor:
        return (level * held + self.levels // 2) // self.levels

    def _keys(self, held: Tensor) -> Tensor:
        """What each level holds and how many of its bins, packed: (cuts, levels, channels)."""
        borders = self._border(held.unsqueeze(1), torch.arange(self.levels + 1, device=held.device))
        return self.packed.index_select(0, borders.view(-1)).view(*borders.shape, -1).diff(dim=1)

    def _cost(self, keys: Tensor) -> Tensor:
        if self.table is not None:
            return self.table.index_select(0, keys.view(-1)).view(keys.shape)
        return _cost(keys, self.shift)


@lru_cache(maxsize=8)
def _table(entries: int, shift: int) -> Tensor:
    return _cost(torch.arange(entries), shift)


def _cost(keys: Tensor, shift: int) -> Tensor:
    """m·log(m / f) of packed pairs."""
    mass, filled = _unpack(keys, shift)
    return mass.mul_((mass.clamp(min=0.5) / filled.clamp_(min=1)).log_())


def _unpack(keys: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    return (keys >> shift).double(), (keys & ((1 << shift) - 1)).double()


def _running(values: Tensor) -> Tensor:
    """Sums of all bins before each, and of all: (bins + 1, channels)."""
    return pad(values.cumsum(0), (0, 0, 1, 0))
