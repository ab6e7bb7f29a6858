"""AdaRoundFakeQuantize: learned rounding of weights (Nagel et al., ICML 2020).

y = (clamp(floor(x / s) + h(V) + z, qmin, qmax) - z) · s,   h(V) = clamp(1.2·sigmoid(V) - 0.1, 0, 1)

    dV = g·s·h'(V)   inside the range, else 0;   h' = 1.2·sigmoid(V)·(1 - sigmoid(V)) where 0 < h < 1
    dx = g           inside the range, else 0

with sigmoid(V) = (1 + tanh(V / 2)) / 2, by :mod:`bitwright.numerics.hyperbolic`.

With a learned scale (Genie; Jeon et al. 2023) the integers stay those of the first scale s, and y is multiplied by t,
one factor per scale: s·t is what is stored, and s·t / t finds the integers again.

The regulariser Σ 1 - |2h - 1|^β drives h to 0 or 1. Without gradients, and once hardened, rounding is up where V >= 0.
"""

import torch
from torch import Tensor, nn

from bitwright.methods.base import Method, register_method
from bitwright.numerics import Fused, PerScale, PerValue, apply_kernel, kernel_operator, quantize_dequantize, wide
from bitwright.numerics.hyperbolic import tanh_and_slope
from bitwright.numerics.views import broadcast
from bitwright.spec import QuantSpec

ZETA, GAMMA = 1.1, -0.1


def fraction(rounding: Tensor) -> Tensor:
    """h(V), between 0 and 1."""
    return (torch.sigmoid(rounding) * (ZETA - GAMMA) + GAMMA).clamp(0.0, 1.0)


def _fraction_and_slope(rounding: Tensor) -> tuple[Tensor, Tensor]:
    """h(V), and its slope where it is neither 0 nor 1."""
    t, slope = tanh_and_slope(rounding * 0.5)
    return (t * 0.6 + 0.5).clamp(0.0, 1.0), slope * 0.3  # (ζ - γ) / 2, and its half


@Fused
def _values(x: Tensor, rounding: PerValue, scale: PerScale, zero_point: PerScale, qmin: int, qmax: int) -> Tensor:
    h, _ = _fraction_and_slope(rounding.to(scale.dtype))
    q = (torch.floor(torch.div(wide(x), scale)) + zero_point + h).clamp(qmin, qmax)
    return ((q - zero_point) * scale).to(x.dtype)


@Fused
def _gradients(
    x: Tensor, grad: PerValue, rounding: PerValue, scale: PerScale, zero_point: PerScale, qmin: int, qmax: int
) -> tuple[Tensor, Tensor]:
    h, slope = _fraction_and_slope(rounding.to(scale.dtype))
    q = torch.floor(torch.div(wide(x), scale)) + zero_point + h
    inside = torch.where((q >= qmin) & (q <= qmax), wide(grad), 0.0)
    up_or_down = torch.where((h > 0.0) & (h < 1.0), inside * scale * slope, 0.0)
    return inside.to(grad.dtype), up_or_down.to(rounding.dtype)


@Fused
def _by_sign(x: Tensor, rounding: PerValue, scale: PerScale) -> Tensor:
    return ((torch.floor(torch.div(wide(x), scale)) + (rounding >= 0)) * scale).to(x.dtype)


learned_rounding = kernel_operator("learned_rounding", _values, _gradients, learned=("rounding",))


@register_method("AdaRoundFakeQuantize", aliases=("adaround", "AdaRound"))
class AdaRoundFakeQuantize(Method):
    """AdaRound: rounds to nearest until :meth:`init` has seen the weight; then V is a Parameter of its shape.

    Attributes:
        hard: round by the sign of V even where gradients are asked for; see :meth:`harden`.
        stretch: t, by which the scale in force is larger than the one that the integers were found with.
        stretching: whether t is being learned, and the stored scale is still the first one.
        soft: returned for the weight while somebody else holds V and wants gradients; stretched if t learns.
    """

    rounding: nn.Parameter | None
    stretch: nn.Parameter | None
    soft: Tensor | None = None

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self.hard = self.stretching = False
        self.register_parameter("rounding", None)
        self.register_parameter("stretch", None)

    @property
    def reconstruction(self) -> str:  # pyrefly: ignore
        return "adaround" if self.rounding is None else ""

    def init(self, weight: Tensor, scale: Tensor, zero_point: Tensor) -> None:
        """Create V so that h(V) is the part of weight / scale that floor cuts off."""
        ratio = weight.detach().float() / broadcast(scale, weight, self.axis, self.group)
        rest = (ratio - torch.floor(ratio)).clamp(1e-4, 1 - 1e-4)
        self.learn("rounding", -torch.log((ZETA - GAMMA) / (rest - GAMMA) - 1))
        self.hard = False

    def harden(self) -> None:
        """From now on round by the sign of V."""
        self.hard = True

    def _first(self, scale: Tensor) -> Tensor:
        """The scale that the integers are found with."""
        return scale if self.stretch is None or self.stretching else scale / self.stretch.detach()

    def _stretched(self, x: Tensor) -> Tensor:
        return x if self.stretch is None else x * broadcast(self.stretch, x, self.axis, self.group)

    def regularizer(self, beta: float | Tensor) -> Tensor:
        """Σ 1 - |2·h(V) - 1|^β: nothing once every h is 0 or 1."""
        if self.rounding is None:
            return torch.zeros(())
        return (1.0 - (2.0 * fraction(self.rounding) - 1.0).abs().pow(beta)).sum()

    def rounded(self, x: Tensor, scale: Tensor) -> Tensor:
        """``x`` at whole numbers of scales, rounded by the sign of V."""
        if self.rounding is None:
            return x
        first = self._first(scale)
        moved = apply_kernel(_by_sign, x, self.rounding.detach(), first, axis=self.axis, group=self.group)
        return self._stretched(moved).detach()

    def integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        return super().integers(self.rounded(x, scale), scale, zero_point)

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantize and dequantize ``x``, softly while V is trained."""
        where = (self.spec.qmin, self.spec.qmax, self.axis, self.group)
        if self.soft is not None and self.differentiable(x):
            return self._stretched(self.soft) if self.stretching else self.soft
        if self.rounding is not None and self.differentiable(x) and not self.hard:
            return self._stretched(learned_rounding(x, self.rounding, self._first(scale), zero_point, *where))
        moved = self.rounded(x, scale)
        if self.rounding is not None and torch.is_grad_enabled() and x.requires_grad:
            moved = moved + (x - x.detach())  # hardened: straight through
        return quantize_dequantize(moved, scale, zero_point, *where)
