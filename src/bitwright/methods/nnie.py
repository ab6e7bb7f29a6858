"""NNIEFakeQuantize: logarithmic levels, as HiSilicon's NNIE has them (its format GFPQ).

With c the largest level, v = x / c, m = qmax steps (127 for 8 bits) and r = (qmax + 1) / 8 of them per factor of two:

    k = clamp(round(r·log2|v|), -m (x > 0) or 1 - m (x < 0), 0)
    y = c·sign(v)·2^(k / r),    0 where |v| is at most half the smallest level of its sign, or x < 0 is unsigned

    dx = g    everywhere

Powers of two are looked up in a table. Eager and compiled logarithms may differ in the last bit, so a value half way
between two levels may go either way.
"""

import torch
from torch import Tensor

from bitwright.methods.base import register_method
from bitwright.methods.nonuniform import NonUniformMethod
from bitwright.methods.options import need_bits
from bitwright.numerics import Fused, PerScale, kernel_operator, wide
from bitwright.spec import QuantSpec


def _values(x: Tensor, largest: PerScale, constants: Tensor, powers: Tensor) -> Tensor:
    rate, lowest, smallest, negative = constants.to(largest.dtype).unbind()
    v = torch.div(wide(x), largest)
    size, minus = v.abs(), v < 0
    k = torch.round(rate * torch.log2(size))
    k = torch.maximum(k, torch.where(minus, lowest + 1.0, lowest)).clamp(max=0.0)
    level = powers.to(v.dtype)[(k - lowest).to(torch.int32).clamp(min=0)] * largest  # NaN has any integer
    dead = size <= torch.where(minus, negative, smallest)
    level = torch.where(dead, 0.0, torch.where(minus, -level, level))
    return torch.where(v.isnan(), v, level).to(x.dtype)


_kernel = Fused(_values, exact=False, assert_indirect_indexing=False)  # no look-up goes beyond the table
logarithmic_quantize = kernel_operator("logarithmic_quantize", _kernel, None)


@register_method("NNIEFakeQuantize", aliases=("nnie", "NNIE"))
class NNIEFakeQuantize(NonUniformMethod):
    """NNIE: nothing is learned; the largest level follows the calibrated range."""

    constants: Tensor  # r, -m, and half of the smallest level above and below zero
    powers: Tensor  # 2^(k / r) for k from -m to 0

    def __init__(self, spec: QuantSpec) -> None:
        need_bits(self, spec, 8)
        super().__init__(spec)
        self.rate, steps = (spec.qmax + 1) / 8, spec.qmax
        negative = 2.0 ** ((1 - steps) / self.rate) / 2 if spec.format.signed else float("inf")
        powers = [2.0 ** (k / self.rate) for k in range(-steps, 1)]
        constants = [self.rate, -steps, powers[0] / 2, negative]
        self.register_buffer("constants", torch.tensor(constants, dtype=torch.float64), persistent=False)
        self.register_buffer("powers", torch.tensor(powers), persistent=False)

    def largest(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The largest level: the calibrated reach, at a whole number of steps of the logarithm."""
        return torch.exp2(torch.round(self.rate * torch.log2(self.reach(scale, zero_point))) / self.rate)

    def levels(self) -> Tensor:
        """Zero and powers of two up to 1; the lowest power is a positive level only."""
        return self.both_signs(torch.cat([torch.zeros_like(self.powers[:1]), self.powers]), self.powers[1:])

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        return logarithmic_quantize(
            x, self.largest(scale, zero_point), self.constants, self.powers, self.axis, self.group
        )
