"""Grid: the scale and zero point of an 8-bit tensor, as the file stores it; Quantized: integers on a grid."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bitwright.exporting.parts import DeployedQuantizer, IntegerTensor
from bitwright.spec import QuantSpec

LEVELS = 255
_SIGNED_SHIFT = 128  # int8 activations are stored as uint8


@dataclass(frozen=True)
class Grid:
    """The values of the 256 levels of an unsigned byte: a step, and the integer for zero, as float32 numbers."""

    scale: Tensor
    zero_point: Tensor

    @classmethod
    def of(cls, part: object) -> "Grid | None":
        """The grid of a deployed quantizer or constant; None if it has several scales, or not exactly 8 bits."""
        if isinstance(part, IntegerTensor):
            shift = 0 if part.integers.dtype is torch.uint8 else None
        else:
            shift = _shift(part.spec) if isinstance(part, DeployedQuantizer) and part.plain else None
        if shift is None or not isinstance(part, DeployedQuantizer | IntegerTensor) or part.scale.ndim:
            return None
        return cls(part.scale.float(), part.zero_point.float() + shift)

    def to(self, device: torch.device) -> Self:
        """The same grid on another device."""
        return type(self)(self.scale.to(device), self.zero_point.to(device))

    def quantize(self, values: Tensor) -> Tensor:
        """The integers nearest to float32 values, as QuantizeLinear rounds them."""
        return self.saturate(torch.round(values / self.scale) + self.zero_point)

    def saturate(self, integers: Tensor) -> Tensor:
        """Saturate integers to the byte."""
        return integers.clamp(0, LEVELS)

    def values(self, integers: Tensor) -> Tensor:
        """What integers stand for, in float32."""
        return (integers - self.zero_point) * self.scale


def _shift(spec: QuantSpec) -> int | None:
    """The offset of the stored integers from the quantizer's; None unless they fill a byte."""
    if spec.format.floating:
        return None
    return {(0, LEVELS): 0, (-_SIGNED_SHIFT, LEVELS - _SIGNED_SHIFT): _SIGNED_SHIFT}.get((spec.qmin, spec.qmax))


@dataclass(frozen=True)
class Quantized:
    """A tensor as a kernel reads it: integers from 0 to 255 on a grid, held as float32."""

    integers: Tensor
    grid: Grid

    @property
    def centred(self) -> Tensor:
        """The integers less the zero point."""
        return self.integers - self.grid.zero_point

    @property
    def values(self) -> Tensor:
        """What the integers stand for, in float32."""
        return self.grid.values(self.integers)


def weight_integers(weight: IntegerTensor) -> Tensor:
    """A stored weight's integers less its zero points, in float64."""
    q, point = weight.integers.double(), weight.zero_point.double()
    if point.ndim and weight.axis is not None:
        point = point.reshape([-1 if d == weight.axis % q.ndim else 1 for d in range(q.ndim)])
    return q - point
