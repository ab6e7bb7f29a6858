"""MomentsBase: what all observers share that derive their range from mean, spread and magnitude."""

from abc import abstractmethod

from torch import Tensor

from bitwright.observers.base import Observer, check_same_kind
from bitwright.observers.state.moments import Moments
from bitwright.observers.state.rows import as_params, as_rows
from bitwright.spec import QuantSpec


class MomentsBase(Observer):
    """Keeps the moments of all values; subclasses say which (``needs``) and write ``from_moments``."""

    needs: tuple[str, ...] = ("spread",)

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self.moments = Moments(self.needs)

    @abstractmethod
    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return the range (channels,) and (channels,)."""

    def observe(self, x: Tensor) -> None:
        """Take the values of ``x`` into the moments."""
        self.moments.add(as_rows(x, self.spec))

    def range(self) -> tuple[Tensor, Tensor]:
        """The range that follows from the moments."""
        if not self.moments.count:
            raise RuntimeError("range() before the first observe()")
        lo, hi = self.from_moments(self.moments)
        return tuple(as_params(v, self.spec, self.param_shape or ()) for v in (lo, hi))  # pyrefly: ignore

    def merge(self, other: Observer) -> None:
        """Combine the moments with those of ``other``."""
        check_same_kind(self, other)
        if isinstance(other, MomentsBase) and other.batches:
            self.moments.merge(other.moments)
            self.param_shape = other.param_shape
            self.batches += other.batches
