"""NNIEFakeQuantize: logarithmic levels, as HiSilicon's NNIE has them (its format GFPQ).

With c the largest magnitude, m = qmax steps (127 for 8 bits) and r = (qmax + 1) / 8 of them per factor of two (16):

    k = clamp(round(r·log2|x|) - Z, 0, m),   Z = round(r·log2 c) - m,      y = sign(x)·2^((k + Z) / r)

Negative values begin at k = 1, and values smaller than half the smallest level of their sign become 0.

    dx = g    everywhere
"""

import torch
from torch import Tensor

from bitwright.methods.base import register_method
from bitwright.methods.levels import LevelMethod
from bitwright.methods.options import need_bits
from bitwright.numerics.logarithmic import logarithmic_quantize
from bitwright.spec import QuantSpec

_NAME = "NNIEFakeQuantize"


@register_method(_NAME, aliases=("nnie", "NNIE"))
class NNIEFakeQuantize(LevelMethod):
    """NNIE: nothing is learned; the largest level follows the calibrated range."""

    def __init__(self, spec: QuantSpec) -> None:
        need_bits(_NAME, spec, 8)
        super().__init__(spec)

    def largest(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The largest level: the calibrated reach, at a whole number of steps of the logarithm."""
        rate = (self.spec.qmax + 1) / 8
        return torch.exp2(torch.round(rate * torch.log2(self.reach(scale, zero_point))) / rate)

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Round ``x`` to the nearest level of the logarithmic scale."""
        spec = self.spec
        largest = self.largest(scale, zero_point)
        return logarithmic_quantize(x, largest, spec.qmax, spec.format.signed, self.axis, self.group)
