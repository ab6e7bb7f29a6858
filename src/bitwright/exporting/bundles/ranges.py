"""What a bundle knows about a quantized tensor: where it is (a place), and its numbers (a range)."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Kind = Literal["activation", "weight", "bias"]


@dataclass(frozen=True)
class Place:
    """Where a quantized tensor is in the float model.

    Attributes:
        tensor: its name in the float model, and in the file of ranges.
        kind: ``activation`` if it is computed, ``weight`` or ``bias`` if it is stored.
        type: the type of its integers in the Q/DQ model, such as ``uint8``.
        bits: the number of bits used.
        integers: the name of its integers in the Q/DQ model, as in the record.
        axis: the axis of its scales; None for one scale.
        block: how many values along the axis share a scale; None for one.
        shape: the shape of its scales.
    """

    tensor: str
    kind: Kind
    type: str
    bits: int
    integers: str
    axis: int | None = None
    block: int | None = None
    shape: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Place":
        """A place from plain data."""
        return cls(**(data | {"shape": tuple(data["shape"])}))

    @property
    def signed(self) -> bool:
        """Whether its integers are."""
        return self.type.startswith("int")

    @property
    def lowest(self) -> int:
        """The lowest integer of its bits."""
        return -(2 ** (self.bits - 1)) if self.signed else 0

    @property
    def highest(self) -> int:
        """The highest integer of its bits."""
        return self.lowest + 2**self.bits - 1


@dataclass(frozen=True, eq=False)
class Range:
    """The numbers of a quantized tensor: real = (integer - zero point) × scale, from ``qmin`` to ``qmax``.

    Attributes:
        place: where it is.
        scale: float32, without dimensions for the whole tensor.
        zero_point: int64, shaped as the scale.
        qmin: the lowest integer that occurs.
        qmax: the highest.
    """

    place: Place
    scale: np.ndarray
    zero_point: np.ndarray
    qmin: int
    qmax: int

    @property
    def minimum(self) -> np.ndarray:
        """The lowest value, in float64."""
        return (self.qmin - self.zero_point) * self.scale.astype(np.float64)

    @property
    def maximum(self) -> np.ndarray:
        """The highest value, in float64."""
        return (self.qmax - self.zero_point) * self.scale.astype(np.float64)

    @property
    def symmetric(self) -> bool:
        """Whether zero is in the middle of signed integers."""
        return self.place.signed and not self.zero_point.any()

    @property
    def per_tensor(self) -> bool:
        """Whether there is one scale."""
        return self.place.axis is None
