"""LearnableFakeQuantize: LSQ, learned step size quantization (Esser et al., ICLR 2020).

y = (clamp(round(x / s) + z, qmin, qmax) - z) · s,  and with v = x / s + z

    dx = g                                 inside (qmin <= v <= qmax), else 0
    ds = Σ g·(round(v) - v)                inside,  Σ g·(qmin - z) below,  Σ g·(qmax - z) above
    dz = -s·Σ g                            outside, if the spec is affine and the zero point is learned

ds and dz times 1 / √(n·qmax), n values per scale. The paper's gradient tells inside from outside before rounding.
"""

from torch import Tensor, nn

from bitwright.methods.base import register_method
from bitwright.methods.clipped import TINY, ClippedMethod, Grid
from bitwright.methods.options import flag
from bitwright.spec import QuantSpec


@register_method("LearnableFakeQuantize", aliases=("lsq", "LSQ"))
class LearnableFakeQuantize(ClippedMethod):
    """LSQ: the scale is a Parameter, and so is the zero point of an affine spec.

    Args:
        use_grad_scaling: multiply the gradients of scale and zero point by 1 / √(n·qmax).
        learn_zero_point: train the zero point of an affine spec, too (rounded where it is used).
    """

    scale: nn.Parameter
    zero_point: nn.Parameter | None

    def __init__(self, spec: QuantSpec, use_grad_scaling: bool = True, learn_zero_point: bool = True) -> None:
        super().__init__(spec, use_grad_scaling)
        self.register_parameter("scale", None)
        if flag(self, "learn_zero_point", learn_zero_point) and not spec.symmetric:
            self.register_parameter("zero_point", None)

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        self.learn("scale", scale)
        if "zero_point" in self._parameters:
            self.learn("zero_point", zero_point)

    def grid(self, zero_point: Tensor) -> Grid:
        """Ends are (qmin - z)·s and (qmax - z)·s."""
        step = self.scale.abs() + TINY
        if self.spec.symmetric:
            return Grid(step, step * self.spec.qmin, step * self.spec.qmax, zero_point)
        learned = self._parameters.get("zero_point")
        whole = zero_point if learned is None else self.integer(learned)
        z = whole.to(step.dtype) if learned is None else learned + (whole - learned).detach()
        return Grid(step, (self.spec.qmin - z) * step, (self.spec.qmax - z) * step, whole)
