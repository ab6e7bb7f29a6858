"""FixedRangeObserver: a range that is known beforehand.  lo = low,  hi = high,  whatever is seen."""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.base import register_observer
from bitwright.observers.minmax import MinMaxObserver
from bitwright.spec import QuantSpec


@register_observer("FixedRangeObserver", aliases=("fixed_range",))
class FixedRangeObserver(MinMaxObserver):
    """Answers the range it was given, for targets that fix the range of an operator's result.

    Args:
        low: the lowest value to represent.
        high: the highest.
    """

    def __init__(self, spec: QuantSpec, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__(spec)
        if not low < high:
            raise ConfigError(f"a range goes from its lowest value up, and low={low} is not below high={high}")
        self.ends = (low, high)

    def range(self) -> tuple[Tensor, Tensor]:
        """The given ends; what was seen where that is not finite."""
        low, high = (torch.where(x.isfinite(), end, x) for x, end in zip(super().range(), self.ends, strict=True))
        return low, high
