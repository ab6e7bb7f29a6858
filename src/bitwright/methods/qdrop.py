"""QDropFakeQuantize: quantize each value at random while the scale is learned (Wei et al., ICLR 2022).

In training each value is quantized with probability p and otherwise kept; in evaluation all are quantized.
With m = 1 for values that are quantized and 0 for the others, and LSQ's y and gradients:

    out = m·y + (1 - m)·x
    dx  = g·(m·[inside] + 1 - m),      ds = LSQ's, of the gradient m·g
"""

import torch
from torch import Tensor

from bitwright.methods.base import register_method
from bitwright.methods.clipped import Grid, clipped_gradients
from bitwright.methods.learnable import LearnableFakeQuantize
from bitwright.methods.options import number
from bitwright.numerics import Fused, PerScale, PerValue, kernel_operator, wide
from bitwright.numerics.noise import draw_key, noise
from bitwright.spec import QuantSpec


@Fused
def _values(
    x: Tensor, scale: PerScale, zero_point: PerScale, key: Tensor, odds: Tensor, qmin: int, qmax: int
) -> Tensor:
    values = wide(x)
    q = (torch.round(torch.div(values, scale)) + zero_point).clamp(qmin, qmax)
    return torch.where(noise(values, key) < odds, (q - zero_point) * scale, values).to(x.dtype)


@Fused
def _gradients(
    x: Tensor,
    grad: PerValue,
    scale: PerScale,
    zero_point: PerScale,
    key: Tensor,
    odds: Tensor,
    qmin: int,
    qmax: int,
) -> tuple[Tensor, ...]:
    values, g = wide(x), wide(grad)
    some = noise(values, key) < odds
    inside, *sums = clipped_gradients(values, torch.where(some, g, 0.0), scale, zero_point, qmin, qmax)
    return torch.where(some, inside, g).to(grad.dtype), *sums


quantize_some = kernel_operator("quantize_some", _values, _gradients, learned=("scale", "low", "high"))


@register_method("QDropFakeQuantize", aliases=("qdrop", "QDrop"))
class QDropFakeQuantize(LearnableFakeQuantize):
    """QDrop: the scale is a Parameter; values are quantized with probability ``prob`` in training.

    Args:
        prob: probability that a value is quantized; 1 is LSQ, the paper has 0.5.
        use_grad_scaling: multiply the gradient of the scale by 1 / √(n·qmax); the paper does not.
        learn_zero_point: train the zero point of an affine spec, too; the paper does not.
    """

    reconstruction = "qdrop"

    def __init__(
        self, spec: QuantSpec, prob: float = 0.5, use_grad_scaling: bool = False, learn_zero_point: bool = False
    ) -> None:
        super().__init__(spec, use_grad_scaling, learn_zero_point)
        self.prob = number(self, "prob", prob, 0.0, 1.0)

    def quantize(self, x: Tensor, grid: Grid, factor: float) -> Tensor:
        if not self.training or self.prob == 1.0:
            return super().quantize(x, grid, factor)
        odds = torch.full((), self.prob - 0.5, device=x.device)  # noise is below with this probability
        where = (self.spec.qmin, self.spec.qmax, factor, self.axis, self.group)
        return quantize_some(x, *grid, draw_key(x), odds, *where)
