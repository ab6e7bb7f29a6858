"""PoTModeObserver: the power-of-two scale that most batches choose, for activations on Vitis hardware.

Each batch votes for the 2**e with its least squared error; scale = 2**(the e with most votes; the coarsest in a tie).
"""

from typing import Self

import torch
from torch import Tensor

from bitwright.observers.base import register_observer
from bitwright.observers.minmax import MinMaxObserver
from bitwright.observers.search.floating import refuse_floating
from bitwright.observers.search.power_of_two import best_exponent, check_candidates
from bitwright.observers.search.scale_range import range_of_scale
from bitwright.observers.state.rows import as_rows
from bitwright.observers.state.streaming import BINS, StreamingHistogram
from bitwright.spec import QuantSpec

FIRST, LAST = -128, 127  # exponents that can be voted for


@register_observer("PoTModeObserver", aliases=("EMAMinMaxFloorObserver", "ModeMinMaxFloor", "pot_mode"))
class PoTModeObserver(MinMaxObserver):
    """The mode of the batches' best exponents; their order does not matter.

    Args:
        candidates: exponents to try for each batch.
        bins: bins per channel, a power of two.
    """

    kept = ("lo", "hi", "votes")  # one row for each channel

    def __init__(self, spec: QuantSpec, candidates: int = 5, bins: int = BINS) -> None:
        super().__init__(spec)
        refuse_floating("PoTModeObserver", spec)
        self.candidates = check_candidates(candidates)
        self.bins = StreamingHistogram(bins).bins
        self.votes = torch.zeros(1, LAST - FIRST + 1, dtype=torch.int64)  # from the highest exponent down

    def observe(self, x: Tensor) -> None:
        histogram = StreamingHistogram(self.bins)
        histogram.add(as_rows(x, self.spec))
        self.widen(*histogram.range())
        self.votes = self.votes.to(x.device).expand(len(histogram.range()[0]), -1).clone()
        if histogram.finite:
            exponent = best_exponent(histogram, self.spec, self.candidates).clamp(FIRST, LAST)
            place = (LAST - exponent).long().unsqueeze(1)
            self.votes.scatter_add_(1, place, torch.ones_like(place))

    def range(self) -> tuple[Tensor, Tensor]:
        lowest, highest = super().range()
        lo, hi = range_of_scale(torch.exp2(LAST - self.votes.argmax(1).double()), lowest, self.spec)
        broken = ~torch.isfinite(lowest + highest)
        return self.shaped(torch.where(broken, lowest, lo), torch.where(broken, highest, hi))

    def absorb(self, other: Self) -> None:
        super().absorb(other)
        self.votes = self.votes + other.votes
