"""APoTFakeQuantize: additive powers of two (Li et al., ICLR 2020).

Levels are α·γ·(p₁ + p₂ + …), each p zero or one of three powers of two (two bits; for an odd number of bits one more p
of one bit), all powers different, γ such that the largest level is α. Signed specs spend a bit on the sign.

    y = α·nearest(clip(x / α, -1 or 0, 1))

    dx = g                                        inside, else 0
    dα = Σ g·(nearest(x / α) - x / α) inside,  Σ g above,  -Σ g below (0 for unsigned)
"""

import itertools

import torch
from torch import Tensor, nn

from bitwright.methods.base import register_method
from bitwright.methods.clipped import TINY
from bitwright.methods.levels import LevelMethod
from bitwright.methods.options import flag, need_bits, need_symmetric
from bitwright.numerics.levels import level_quantize, nearest
from bitwright.spec import QuantSpec

_NAME = "APoTFakeQuantize"


def additive_powers(bits: int) -> Tensor:
    """The 2**bits magnitudes as whole numbers, up to a factor: ``additive_powers(2)`` is 0, 1, 2, 4."""
    pairs = bits // 2
    terms: list[list[int]] = [[0] for _ in range(pairs + bits % 2)]
    # Powers are dealt out in turn: twice to every p of two bits, once to that of one bit, then the third time.
    turns = [*range(pairs), *range(pairs), *range(pairs, len(terms)), *range(pairs)]
    for exponent, term in enumerate(reversed(turns)):
        terms[term].append(2**exponent)
    return torch.tensor(sorted(sum(each) for each in itertools.product(*terms)), dtype=torch.float64)


@register_method(_NAME, aliases=("apot", "APoT"))
class APoTFakeQuantize(LevelMethod):
    """APoT: the clipping value alpha is a Parameter.

    Args:
        spec: what the quantized tensor looks like; symmetric, up to 8 bits.
        weight_norm: bring weights to mean 0 and standard deviation 1 first, as the paper does.
        use_grad_scaling: multiply the gradient of alpha by 1 / √(n·qmax); the paper does not.
    """

    alpha: nn.Parameter
    table: Tensor

    def __init__(self, spec: QuantSpec, weight_norm: bool = False, use_grad_scaling: bool = False) -> None:
        need_symmetric(_NAME, spec)
        need_bits(_NAME, spec, 8)
        super().__init__(spec)
        table = nearest(additive_powers(spec.bits - int(spec.format.signed)))
        self.register_buffer("table", table.float(), persistent=False)
        self.weight_norm = flag(_NAME, "weight_norm", weight_norm)
        self.use_grad_scaling = flag(_NAME, "use_grad_scaling", use_grad_scaling)
        self.register_parameter("alpha", None)

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        """Begin from the calibrated range (in standard deviations, 3, for normalised weights)."""
        reach = self.reach(scale, zero_point)
        self.learn("alpha", torch.full_like(reach, 3.0) if self.weight_norm else reach)

    def largest(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The largest level."""
        if self._parameters["alpha"] is None:
            self.start(scale, zero_point)
        return self.alpha.abs() + TINY

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Round ``x`` to the nearest level."""
        if self.weight_norm:
            x = (x - x.mean()) / (x.std() + 1e-5)
        largest = self.largest(scale, zero_point)
        factor = self.gradient_factor(x, scale) if self.use_grad_scaling else 1.0
        return level_quantize(x, largest, self.table, self.spec.format.signed, factor, self.axis, self.group)
