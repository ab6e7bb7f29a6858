"""NonUniformMethod: the base of methods whose levels are not evenly spaced."""

import torch
from torch import Tensor

from bitwright.methods.base import Method


class NonUniformMethod(Method):
    """Rounds to levels between 0 and a largest magnitude, on one side of zero or on both."""

    uniform = False

    def largest(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The magnitude of the largest level."""
        raise NotImplementedError(
            f"{type(self).__name__} must define how far it reaches: write largest(scale, zero_point)"
        )

    def unit(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        with torch.no_grad():
            return self.largest(scale, zero_point).float()

    def reach(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The largest magnitude of the calibrated range."""
        spec = self.spec
        ends = spec.qmax - zero_point
        if spec.format.signed and not spec.symmetric:
            ends = torch.maximum(ends, zero_point - spec.qmin)
        return ends.clamp(min=1) * scale.float()

    def qparams(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """A scale that spans the levels; they are not multiples of it."""
        return self.unit(scale, zero_point) / self.spec.qmax, torch.zeros_like(zero_point)

    def both_signs(self, magnitudes: Tensor, negative: Tensor | None = None) -> Tensor:
        """Combine levels of magnitudes from 0 with the ``negative`` ones (the same if None) if the spec is signed."""
        if not self.spec.format.signed:
            return magnitudes
        return torch.cat([-(magnitudes[1:] if negative is None else negative).flip(0), magnitudes])
