"""MomentsBase: the base of observers that derive their range from mean, spread and magnitude."""

from abc import abstractmethod
from typing import Self

from torch import Tensor

from bitwright.observers.base import Observer
from bitwright.observers.state.moments import Moments
from bitwright.observers.state.rows import as_rows
from bitwright.spec import QuantSpec


class MomentsBase(Observer):
    """Keeps the moments of all values; subclasses say which (``needs``) and write ``from_moments``."""

    kept = tuple(f"moments.{name}" for name in ("count", "mean", "square", "magnitude", "nonzero", "lo", "hi"))
    needs: tuple[str, ...] = ("spread",)

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self.moments = Moments(self.needs)

    @abstractmethod
    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return the range (channels,) and (channels,)."""

    def observe(self, x: Tensor) -> None:
        self.moments.add(as_rows(x, self.spec))

    def range(self) -> tuple[Tensor, Tensor]:
        if not self.moments.count:
            raise RuntimeError("range() before the first observe()")
        return self.shaped(*self.from_moments(self.moments))

    def absorb(self, other: Self) -> None:
        self.moments.merge(other.moments)
