"""PoTModeObserver: the power-of-two scale that most batches choose, for activations on Vitis hardware.

Each batch votes for the 2**e with its least squared error; scale = 2**(the e with most votes, the coarsest of a tie).
"""

import torch
from torch import Tensor

from bitwright.observers.base import Observer, check_same_kind, register_observer
from bitwright.observers.search.floating import refuse_floating
from bitwright.observers.search.power_of_two import best_exponent, check_candidates
from bitwright.observers.search.scale_range import range_of_scale
from bitwright.observers.state.rows import as_params, as_rows
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec

FIRST, LAST = -128, 127  # exponents that can be voted for


@register_observer("PoTModeObserver", aliases=("EMAMinMaxFloorObserver", "ModeMinMaxFloor", "pot_mode"))
class PoTModeObserver(Observer):
    """The mode of the batches' best exponents; their order does not matter.

    Args:
        spec: what the range is for.
        candidates: exponents to try for each batch.
        bins: bins per channel, a power of two.
    """

    def __init__(self, spec: QuantSpec, candidates: int = 5, bins: int = BINS) -> None:
        super().__init__(spec)
        refuse_floating("PoTModeObserver", spec)
        self.candidates = check_candidates(candidates)
        self.bins = StreamingHistogram(bins).bins
        self.votes: Tensor | None = None  # (channels, exponents), from the highest down
        self.lo: Tensor | None = None
        self.hi: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        """Let ``x`` vote."""
        histogram = StreamingHistogram(self.bins)
        histogram.add(as_rows(x, self.spec))
        lo, hi = histogram.range()
        votes = torch.zeros(len(lo), LAST - FIRST + 1, dtype=torch.int64, device=lo.device)
        if histogram.finite:
            exponent = best_exponent(histogram, self.spec, self.candidates).clamp(FIRST, LAST)
            votes.scatter_(1, (LAST - exponent).long().unsqueeze(1), 1)
        self._add(votes, lo, hi)

    def range(self) -> tuple[Tensor, Tensor]:
        """The range that the chosen power of two represents."""
        if self.votes is None or self.lo is None or self.hi is None:
            raise RuntimeError("range() before the first observe()")
        scale = torch.exp2(LAST - self.votes.argmax(1).double())
        lo, hi = range_of_scale(scale, self.lo, self.spec)
        broken = ~torch.isfinite(self.lo + self.hi)
        lo, hi = torch.where(broken, self.lo, lo), torch.where(broken, self.hi, hi)
        return tuple(as_params(v, self.spec, self.param_shape or ()) for v in (lo, hi))  # pyrefly: ignore

    def merge(self, other: Observer) -> None:
        """Add the votes of ``other``."""
        check_same_kind(self, other)
        if not isinstance(other, PoTModeObserver):
            return
        if other.votes is not None and other.lo is not None and other.hi is not None:
            self._add(other.votes, other.lo, other.hi)
            self.param_shape = other.param_shape
            self.batches += other.batches

    def _add(self, votes: Tensor, lo: Tensor, hi: Tensor) -> None:
        self.votes = votes if self.votes is None else self.votes + votes
        self.lo = lo if self.lo is None else torch.minimum(self.lo, lo)
        self.hi = hi if self.hi is None else torch.maximum(self.hi, hi)
