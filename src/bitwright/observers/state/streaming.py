"""StreamingHistogram: counts per channel in bins whose width is a power of two, so that bins merge exactly.

Bin k of a channel counts the values in [k·w, (k + 1)·w), for k from -bins/2 to bins/2 - 1 and w = 2**e, with e the
least that fits the largest magnitude seen. When a larger one comes, w doubles as often as needed and bin k becomes
bin floor(k / 2), exactly: the counts are those that the final width would have given from the start, whatever the
order of the batches. As long as a channel has seen no more than ``KEPT`` values per bin, the values themselves are
kept, in float32, which is no larger than counts in int64, and exact.
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.state.ranks import at_places
from bitwright.observers.state.rows import BLOCK, blocks, row_min_max

BINS = 4096
KEPT = 2  # values per bin
LEAST_EXPONENT = -110  # widths and their inverses stay normal float32


class StreamingHistogram:
    """Histogram of each channel, batch by batch; the state is O(channels × bins).

    Args:
        bins: bins per channel, a power of two.
    """

    def __init__(self, bins: int = BINS) -> None:
        if isinstance(bins, bool) or not isinstance(bins, int) or not 16 <= bins <= 2**20 or bins & (bins - 1):
            raise ConfigError(f"bins must be a power of two from 16 to 2**20, not {bins!r}")
        self.bins = bins
        self.lo: Tensor | None = None  # (channels,)
        self.hi: Tensor | None = None
        self._exact: Tensor | None = None  # (channels, values)
        self._counts: Tensor | None = None  # (channels, bins)
        self._exponent: Tensor | None = None  # (channels,)

    @property
    def finite(self) -> bool:
        """Whether all that was seen is finite; if not, it is not counted either."""
        return self.lo is not None and self.hi is not None and bool(torch.isfinite(self.lo + self.hi).all())

    def add(self, rows: Tensor) -> None:
        """Count values given as (outer, channel, inner)."""
        self._widen(*row_min_max(rows))
        if not self.finite:
            return
        self._take(rows)

    def merge(self, other: "StreamingHistogram") -> None:
        """Take over what another histogram of as many channels and bins has counted."""
        if other.bins != self.bins:
            raise ConfigError(f"histograms of {other.bins} and {self.bins} bins cannot be merged")
        if other.lo is None or other.hi is None:
            return
        self._widen(other.lo, other.hi)
        if not self.finite:
            return
        if other._exact is not None:
            self._take(other._exact.unsqueeze(0))
            return
        self._fit()
        (counts, exponent), (more, finer) = self._state(), other._state()
        counts += _coarser(more, exponent - finer)

    @property
    def values(self) -> int:
        """How many values each channel has seen."""
        return self._exact.shape[1] if self._exact is not None else int(self._state()[0][0].sum())

    def counts(self, bins: int | None = None) -> tuple[Tensor, Tensor]:
        """Counts (channels, bins) and the width of the bins (channels,); bin j starts at (j - bins/2)·width.

        Bins are joined to at most ``bins``, a power of two.
        """
        bins = bins or self.bins
        if self._exact is None:
            counts, exponent = self._state()
            joined = self.bins // bins
            return counts.view(len(counts), bins, joined).sum(2) if joined > 1 else counts, torch.exp2(
                exponent.double()
            ) * joined
        twin = StreamingHistogram(bins)
        twin._widen(*self.range())
        twin._fit()
        twin._count(self._exact.unsqueeze(0))
        return twin.counts()

    def exact(self) -> Tensor | None:
        """The values themselves, (channels, values), if they were few enough to be kept."""
        return self._exact

    def range(self) -> tuple[Tensor, Tensor]:
        """Lowest and highest value seen of each channel; not finite if something seen was not."""
        if self.lo is None or self.hi is None:
            raise RuntimeError("range() before the first observe()")
        return self.lo, self.hi

    def edges(self) -> tuple[Tensor, Tensor]:
        """Counts and the edges of bins cut to the range seen, (channels, bins + 1), in float64.

        Bins outside of [lo, hi] are empty and of width zero; those on its border are cut, so a value that many
        share with the border (0 and 6 of a ReLU6) is where it is, not half a bin off.
        """
        counts, width = self.counts()
        lo, hi = (v.double().unsqueeze(1) for v in self.range())
        edges = torch.arange(-self.bins // 2, self.bins // 2 + 1, dtype=torch.float64, device=width.device)
        edges = (edges * width.unsqueeze(1)).clamp(lo, hi)
        used = counts.any(0).nonzero().reshape(-1)
        # In steps of 128, so that neighbours are merged in the same pairs whatever the other channels hold.
        first, last = int(used[0]) // 128 * 128, min(self.bins, (int(used[-1]) // 128 + 1) * 128)
        return counts[:, first:last], edges[:, first : last + 1]

    def quantile(self, level: float | Tensor) -> Tensor:
        """Value that the share ``level`` of each channel's values does not exceed, interpolated within a bin."""
        lo, hi = self.range()
        share = torch.as_tensor(level, dtype=torch.float64, device=lo.device).expand(len(lo))
        if self._exact is not None:
            place = (share * (self._exact.shape[1] - 1)).clamp(0)
            places = torch.stack([place.floor(), place.ceil()], 1).long()
            below, above = at_places(self._exact, places).double().unbind(1)
            return (below + (above - below) * (place - place.floor())).to(lo)
        counts, edges = self.edges()
        total = counts.cumsum(1).double()
        wanted = share.unsqueeze(1) * total[:, -1:]
        at = torch.searchsorted(total, wanted).clamp(max=total.shape[1] - 1)
        held = counts.gather(1, at).double()
        part = ((wanted - total.gather(1, at) + held) / held.clamp(min=1)).clamp(0, 1)
        start, stop = edges.gather(1, at), edges.gather(1, at + 1)
        return (start + (stop - start) * part).squeeze(1).to(lo).clamp(lo, hi)

    def share_of_signs(self) -> tuple[Tensor, Tensor]:
        """Share of negative and of positive values of each channel; zeros are neither.

        In a histogram, zeros (of a ReLU) are what bin 0 holds more than bin 1.
        """
        if self._exact is not None:
            values = self._exact
            return tuple(v.float().sum(1).double() / values.shape[1] for v in (values < 0, values > 0))  # pyrefly: ignore
        counts, half = self._state()[0], self.bins // 2
        total = counts.sum(1).double()
        zeros = (counts[:, half] - counts[:, half + 1]).clamp(min=0)
        return counts[:, :half].sum(1) / total, (counts[:, half:].sum(1) - zeros) / total

    def folded(self) -> "StreamingHistogram":
        """The histogram of |x|: a negative bin k is counted with its mirror image -k - 1."""
        lo, hi = self.range()
        mirror = StreamingHistogram(self.bins)
        mirror.lo = torch.where((lo < 0) & (hi > 0), 0.0, torch.minimum(lo.abs(), hi.abs()))
        mirror.hi = torch.maximum(lo.abs(), hi.abs())
        if self._exact is not None:
            mirror._exact = self._exact.abs()
        elif self._counts is not None:
            mirror._exponent, half = self._exponent, self.bins // 2
            counts = self._counts[:, half:] + self._counts[:, :half].flip(1)
            mirror._counts = torch.cat([torch.zeros_like(counts), counts], 1)
        return mirror

    def split(self, channels: int) -> "list[StreamingHistogram]":
        """Histograms of so many channels each, as views of this one."""
        lo, hi = self.range()
        parts = []
        for start in range(0, len(lo), channels):
            part, rows = StreamingHistogram(self.bins), slice(start, start + channels)
            part.lo, part.hi = lo[rows], hi[rows]
            part._exact, part._counts, part._exponent = (
                None if v is None else v[rows] for v in (self._exact, self._counts, self._exponent)
            )
            parts.append(part)
        return parts

    def _state(self) -> tuple[Tensor, Tensor]:
        if self._counts is None or self._exponent is None:
            raise RuntimeError("counts() before the first finite value was added")
        return self._counts, self._exponent

    def _take(self, rows: Tensor) -> None:
        """Keep finite values if they are few enough, or count them."""
        outer, channels, inner = rows.shape
        kept = 0 if self._exact is None else self._exact.shape[1]
        if self._counts is not None or kept + outer * inner > KEPT * self.bins:
            self._fit()
            self._count(rows)
            return
        values = rows.transpose(0, 1).reshape(channels, outer * inner).float()
        self._exact = values.clone() if self._exact is None else torch.cat([self._exact, values], 1)

    def _widen(self, lo: Tensor, hi: Tensor) -> None:
        self.lo = lo if self.lo is None else torch.minimum(self.lo, lo)
        self.hi = hi if self.hi is None else torch.maximum(self.hi, hi)

    def _fit(self) -> None:
        """Widen the bins to the range, and turn kept values into counts."""
        lo, hi = self.range()
        # reach < 2**power: in units of the width it is below bins/2.
        power = torch.frexp(torch.maximum(lo.abs(), hi.abs())).exponent
        exponent = (power - (self.bins.bit_length() - 2)).long().clamp(min=LEAST_EXPONENT)
        if self._counts is None or self._exponent is None:
            self._counts = torch.zeros(len(lo), self.bins, dtype=torch.int64, device=lo.device)
        elif not torch.equal(exponent, self._exponent):
            self._counts = _coarser(self._counts, exponent - self._exponent)
        self._exponent = exponent
        if self._exact is not None:
            values, self._exact = self._exact, None
            self._count(values.unsqueeze(0))

    def _count(self, rows: Tensor) -> None:
        counts, exponent = self._state()
        inverse = torch.exp2(-exponent.float()).unsqueeze(1)
        start = torch.arange(len(counts), device=rows.device, dtype=torch.int32).unsqueeze(1) * self.bins
        alone = len(counts) == 1 and self.bins <= torch.iinfo(torch.int16).max
        # Memory is taken once: fresh memory for each block would cost more than the arithmetic.
        size = min(BLOCK, rows.numel())
        places = torch.empty(size, device=rows.device)
        indices = torch.empty(size, device=rows.device, dtype=torch.int16 if alone else torch.int32)
        one = counts.new_ones(1)
        for where, block in blocks(rows):
            place, index = (v[: block.numel()].view(block.shape) for v in (places, indices))
            torch.mul(block, inverse[where], out=place)
            index.copy_(place.floor_().add_(self.bins // 2))
            mine = counts[where].view(-1)
            if where.stop - where.start > 1:
                index += start[: where.stop - where.start]
            if len(mine) <= 2 * index.numel():
                mine += torch.bincount(index.view(-1), minlength=len(mine))
            else:
                mine.scatter_add_(0, index.view(-1).long(), one.expand(index.numel()))


def _coarser(counts: Tensor, doublings: Tensor) -> Tensor:
    """Merge the bins of each channel as if their width had been doubled so often: bin k becomes k >> doublings."""
    half = counts.shape[1] // 2
    place = torch.arange(-half, half, device=counts.device).unsqueeze(0) >> doublings.clamp(0, 62).unsqueeze(1)
    return torch.zeros_like(counts).scatter_add_(1, place + half, counts)
