"""DSQFakeQuantize: differentiable soft quantization (Gong et al., ICCV 2019).

Forward rounds, backward follows a staircase of tanh between the learned ends low and high, with the learned
temperature α in (0, ½): the smaller, the steeper. With Δ the step, Q = qmax - qmin steps between the ends,
v = (x - low) / Δ counted in steps, i = floor(v) and f = v - i - ½, the staircase is

    σ(v) = i + (S·tanh(K·f) + 1) / 2,    S = 1 / (1 - α),  K = ln(2 / α - 1),    y = low + Δ·σ(v)

    x      σ' = S·K·(1 - tanh²(K·f)) / 2                               0 outside [low, high]
    α      Δ/2 · (S²·tanh(K·f) - S·(1 - tanh²(K·f))·f·2 / (α·(2 - α)))  0 outside
    high   (σ - v·σ') / Q                                               1 above, 0 below
    low    1 - σ/Q - σ'·(1 - v/Q)                                       1 below, 0 above

Sums of compiled and of eager kernels may differ in the last bits.
"""

import torch
from torch import Tensor, nn

from bitwright.methods.base import register_method
from bitwright.methods.clipped import ClippedMethod, Grid
from bitwright.methods.options import flag, number
from bitwright.numerics import Fused, PerScale, PerValue, kernel_operator, total, wide
from bitwright.numerics.hyperbolic import tanh_and_slope
from bitwright.numerics.qdq import nearest_level
from bitwright.spec import QuantSpec

_SOFTEST, _HARDEST = 0.5, 0.01


@Fused
def _gradients(
    x: Tensor,
    grad: PerValue,
    scale: PerScale,
    zero_point: PerScale,
    steepness: PerScale,
    gain: PerScale,
    bend: PerScale,
    qmin: int,
    qmax: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, α, low and high, from K, S and 2 / (α·(2 - α)), made once and not for every value."""
    values, g = wide(x), wide(grad)
    v = torch.div(values, scale) + (zero_point - qmin)
    below, above = v < 0, v > qmax - qmin
    i = torch.floor(v).clamp(0, qmax - qmin - 1)
    f = v - i - 0.5
    t, bend_of_t = tanh_and_slope(f * steepness)
    t, bump = t * gain, bend_of_t * gain
    slope = bump * (0.5 * steepness)
    rest = torch.where(below | above, 0.0, g)
    rise = (i + 0.5 * (t + 1.0) - v * slope) * (1.0 / (qmax - qmin))
    return (
        (rest * slope).to(grad.dtype),
        total(rest * (gain * t - bump * f * bend)) * (scale.squeeze(-1) / 2),
        total(torch.where(below, g, rest * (1.0 - slope - rise))),
        total(torch.where(above, g, rest * rise)),
    )


soft_quantize = kernel_operator("soft_quantize", nearest_level, _gradients, learned=("alpha", "low", "high"))


@register_method("DSQFakeQuantize", aliases=("dsq", "DSQ"))
class DSQFakeQuantize(ClippedMethod):
    """DSQ: temperature alpha and the ends ``upper`` (for affine specs also ``lower``) are Parameters.

    Args:
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
        super().__init__(spec, use_grad_scaling)
        self.initial = number(self, "alpha", alpha, _HARDEST, _SOFTEST)
        self.learn_alpha = flag(self, "learn_alpha", learn_alpha)
        self.register_parameter("upper", None)
        if not spec.symmetric:
            self.register_parameter("lower", None)
        self.register_parameter("alpha", None)

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        self.learn("upper", (self.spec.qmax - zero_point) * scale)
        if not self.spec.symmetric:
            self.learn("lower", (self.spec.qmin - zero_point) * scale)
        self.learn("alpha", torch.full_like(scale, self.initial))
        self.alpha.requires_grad_(self.learn_alpha)

    def grid(self, zero_point: Tensor) -> Grid:
        return self.between(None if self.spec.symmetric else self.lower, self.upper, zero_point)

    def quantize(self, x: Tensor, grid: Grid, factor: float) -> Tensor:
        alpha = self.alpha + (self.alpha.detach().clamp(_HARDEST, _SOFTEST) - self.alpha).detach()
        a, (step, low, high, zero_point) = alpha.detach(), grid
        shape = (torch.log(2.0 / a - 1.0), 1.0 / (1.0 - a), 2.0 / (a * (2.0 - a)))
        limits = (self.spec.qmin, self.spec.qmax)
        return soft_quantize(x, alpha, low, high, step, zero_point, *limits, *shape, factor, self.axis, self.group)
