"""APoTFakeQuantize: additive powers of two (Li et al., ICLR 2020).

Levels are α·γ·(p₁ + p₂ + …), each p zero or one of three powers of two (two bits; for an odd number of bits one more p
of one bit), all powers different, γ such that the largest level is α. Signed specs spend a bit on the sign.

    y = α·nearest(clip(x / α, -1 or 0, 1))

    dx = g                                        inside, else 0
    dα = Σ g·(nearest(x / α) - x / α) inside,  Σ g above,  -Σ g below (0 for unsigned)

The nearest level is found in a table: ``table[j]`` is the level (from 0 to 1) nearest to magnitudes in
[j, j + 1) / (len(table) - 1). All levels are whole multiples of 1/n, so a table of 2n + 1 cells knows every bound
between them exactly, and nothing of size values × levels is made.
"""

import itertools
from functools import partial

import torch
from torch import Tensor, nn

from bitwright.methods.base import register_method
from bitwright.methods.clipped import TINY
from bitwright.methods.nonuniform import NonUniformMethod
from bitwright.methods.options import flag, need_bits, need_symmetric
from bitwright.numerics import Fused, PerScale, PerValue, kernel_operator, total, wide
from bitwright.spec import QuantSpec


def _look_up(v: Tensor, table: Tensor) -> Tensor:
    """The levels nearest to values from -1 to 1; NaN stays NaN."""
    level = table.to(v.dtype)[(v.abs() * (table.shape[0] - 1)).to(torch.int32).clamp(min=0)]  # NaN has any integer
    return torch.where(v.isnan(), v, torch.where(v < 0, -level, level))


def _values(x: Tensor, scale: PerScale, table: Tensor, signed: bool) -> Tensor:
    v = torch.div(wide(x), scale).clamp(-1.0 if signed else 0.0, 1.0)
    return (_look_up(v, table) * scale).to(x.dtype)


def _gradients(x: Tensor, grad: PerValue, scale: PerScale, table: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    raw = torch.div(wide(x), scale)
    v = raw.clamp(-1.0 if signed else 0.0, 1.0)
    inside = raw == v
    return grad * inside, total(wide(grad) * (_look_up(v, table) - torch.where(inside, v, 0.0)))


_in_bounds = partial(Fused, assert_indirect_indexing=False)  # no look-up goes beyond the table
level_quantize = kernel_operator("level_quantize", _in_bounds(_values), _in_bounds(_gradients), learned=("scale",))


def nearest_table(levels: Tensor) -> Tensor:
    """The table of sorted ``levels`` from 0 to a whole number n, all whole numbers, in units of n."""
    n = int(levels[-1])
    places = torch.arange(2 * n + 1, device=levels.device, dtype=levels.dtype) / 2 + 0.25
    bounds = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize(places, bounds)] / n


def additive_powers(bits: int) -> Tensor:
    """The 2**bits magnitudes as whole numbers, up to a factor: ``additive_powers(2)`` is 0, 1, 2, 4."""
    pairs = bits // 2
    terms: list[list[int]] = [[0] for _ in range(pairs + bits % 2)]
    # Powers are dealt out in turn: twice to every p of two bits, once to that of one bit, then the third time.
    turns = [*range(pairs), *range(pairs), *range(pairs, len(terms)), *range(pairs)]
    for exponent, term in enumerate(reversed(turns)):
        terms[term].append(2**exponent)
    return torch.tensor(sorted(sum(each) for each in itertools.product(*terms)), dtype=torch.float64)


@register_method("APoTFakeQuantize", aliases=("apot", "APoT"))
class APoTFakeQuantize(NonUniformMethod):
    """APoT: the clipping value alpha is a Parameter; for symmetric specs of up to 8 bits.

    Args:
        weight_norm: bring weights to mean 0 and standard deviation 1 first, as the paper does.
        use_grad_scaling: multiply the gradient of alpha by 1 / √(n·qmax); the paper does not.
    """

    alpha: nn.Parameter
    table: Tensor

    def __init__(self, spec: QuantSpec, weight_norm: bool = False, use_grad_scaling: bool = False) -> None:
        need_symmetric(self, spec)
        need_bits(self, spec, 8)
        super().__init__(spec)
        table = nearest_table(additive_powers(spec.bits - int(spec.format.signed)))
        self.register_buffer("table", table.float(), persistent=False)
        self.weight_norm = flag(self, "weight_norm", weight_norm)
        self.keeps_size = not weight_norm
        self.use_grad_scaling = flag(self, "use_grad_scaling", use_grad_scaling)
        self.register_parameter("alpha", None)

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        """Begin from the calibrated range (in standard deviations, 3, for normalised weights)."""
        reach = self.reach(scale, zero_point)
        self.learn("alpha", torch.full_like(reach, 3.0) if self.weight_norm else reach)

    def largest(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        if self._parameters["alpha"] is None:
            self.start(scale, zero_point)
        return self.alpha.abs() + TINY

    def levels(self) -> Tensor:
        """Sums of powers of two up to 1."""
        return self.both_signs(self.table.unique())

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        if self.weight_norm:
            x = (x - x.mean()) / (x.std() + 1e-5)
        largest = self.largest(scale, zero_point)
        factor = self.gradient_factor(x, scale) if self.use_grad_scaling else 1.0
        return level_quantize(x, largest, self.table, self.spec.format.signed, factor, self.axis, self.group)
