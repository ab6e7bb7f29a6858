"""DSQFakeQuantize: differentiable soft quantization (Gong et al., ICCV 2019).

Forward rounds, backward follows a staircase of tanh between the learned ends low and high, with the learned
temperature α in (0, ½): the smaller, the steeper. With Δ the step, f in [-½, ½] the place between two steps,
S = 1 / (1 - α) and K = ln(2 / α - 1)

    Q(x) = low + Δ·(i + (S·tanh(K·f) + 1) / 2)

    dx, dα, dlow, dhigh are those of Q;  outside, dx = dα = 0 and the end on that side gets Σ g

The formulas are in :mod:`bitwright.numerics.soft`.
"""

import torch
from torch import Tensor, nn

from bitwright.methods.base import register_method
from bitwright.methods.clipped import TINY, ClippedMethod, Grid
from bitwright.methods.options import flag, number
from bitwright.numerics.soft import soft_quantize
from bitwright.spec import QuantSpec

_NAME = "DSQFakeQuantize"
_SOFTEST, _HARDEST = 0.5, 0.01


@register_method(_NAME, aliases=("dsq", "DSQ"))
class DSQFakeQuantize(ClippedMethod):
    """DSQ: temperature alpha and the ends ``upper`` (for affine specs also ``lower``) are Parameters.

    Args:
        spec: what the quantized tensor looks like.
        alpha: the temperature to begin with (MQBench 0.4, DSQ's authors 0.2).
        learn_alpha: train the temperature.
        use_grad_scaling: multiply the gradients of temperature and ends by 1 / √(n·qmax); the paper does not.
    """

    upper: nn.Parameter
    lower: nn.Parameter
    alpha: nn.Parameter

    def __init__(
        self, spec: QuantSpec, alpha: float = 0.2, learn_alpha: bool = True, use_grad_scaling: bool = False
    ) -> None:
        super().__init__(spec, flag(_NAME, "use_grad_scaling", use_grad_scaling))
        self.initial = number(_NAME, "alpha", alpha, _HARDEST, _SOFTEST)
        self.learn_alpha = flag(_NAME, "learn_alpha", learn_alpha)
        self.register_parameter("upper", None)
        if not spec.symmetric:
            self.register_parameter("lower", None)
        self.register_parameter("alpha", None)

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        """Begin from the ends of the calibrated range."""
        self.learn("upper", (self.spec.qmax - zero_point) * scale)
        if not self.spec.symmetric:
            self.learn("lower", (self.spec.qmin - zero_point) * scale)
        self.learn("alpha", torch.full_like(scale, self.initial))
        self.alpha.requires_grad_(self.learn_alpha)

    def grid(self, zero_point: Tensor) -> Grid:
        """Ends are what is learned; zero stays exact, so the step and zero point follow as integers allow."""
        qmin, qmax = self.spec.qmin, self.spec.qmax
        if self.spec.symmetric:
            upper = self.upper.abs() + TINY
            return Grid((upper / qmax).detach(), upper * (qmin / qmax), upper, torch.zeros_like(zero_point))
        high, low = self.upper.detach().clamp(min=0.0), self.lower.detach().clamp(max=0.0)
        step = (high - low) / (qmax - qmin) + TINY
        return Grid(step, self.lower, self.upper, self.integer(qmin - low / step))

    def quantize(self, x: Tensor, grid: Grid, factor: float) -> Tensor:
        """Round forward, the staircase's slope backward."""
        alpha = self.alpha + (self.alpha.detach().clamp(_HARDEST, _SOFTEST) - self.alpha).detach()
        step, low, high, zero_point = grid
        where = (self.spec.qmin, self.spec.qmax, factor, self.axis, self.group)
        return soft_quantize(x, alpha, low, high, step, zero_point, *where)
