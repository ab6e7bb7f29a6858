"""FixedRangeObserver: a range known in advance.  lo = low,  hi = high,  whatever is seen."""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.observers.base import register_observer
from bitwright.observers.minmax import MinMaxObserver
from bitwright.spec import QuantSpec


@register_observer("FixedRangeObserver", aliases=("fixed_range",))
class FixedRangeObserver(MinMaxObserver):
    """Returns the range it was given, for targets that fix the range of an operator's result.

    Args:
        low: the lowest value to represent.
        high: the highest.
    """

    def __init__(self, spec: QuantSpec, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__(spec)
        if not low < high:
            raise ConfigError(f"low must be below high, but low={low} and high={high}")
        self.ends = (low, high)

    def range(self) -> tuple[Tensor, Tensor]:
        """The given ends, or what was seen if that is not finite."""
        low, high = (torch.where(x.isfinite(), end, x) for x, end in zip(super().range(), self.ends, strict=True))
        return low, high
