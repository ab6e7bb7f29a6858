"""Calibrator: collects tensors, then computes amax."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bitwright.errors import ConfigError


class Calibrator(ABC):
    """Sees tensors and answers the largest magnitude to represent.

    Args:
        num_bits: bits of the integers, or (4, 3) or (5, 2) for fp8.
        axis: the axes that keep an amax of their own; None is one for the tensor.
        unsigned: whether the integers start from 0.
    """

    def __init__(
        self,
        num_bits: int | tuple[int, int] = 8,
        axis: int | Sequence[int] | None = None,
        unsigned: bool = False,
    ) -> None:
        self._num_bits, self._axis, self._unsigned = num_bits, axis, unsigned
        self.batches = 0

    @abstractmethod
    def collect(self, x: Tensor) -> None:
        """Take one tensor into account."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @abstractmethod
    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The largest magnitude to represent, or None if nothing was seen."""

    def reach(self) -> Tensor | None:
        """The largest magnitude seen, at little cost, or None if nothing was."""
        return self.compute_amax()

    def __repr__(self) -> str:
        axis = "per-tensor" if self._axis is None else f"axis={self._axis}"
        return f"{type(self).__name__}({self._num_bits}bit {axis}, {self.batches} batches)"


def axes_of(axis: int | Sequence[int] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """The kept axes of a tensor of ``shape``, counted from the front."""
    given = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    for a in given:
        if not -len(shape) <= a < len(shape):
            raise ConfigError(f"axis {a} is out of range for a tensor of shape {tuple(shape)}")
    return tuple(sorted(a % len(shape) for a in given))
