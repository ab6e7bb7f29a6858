"""LSQPlusFakeQuantize: LSQ+ learns the scale and the offset of the grid (Bhalgat et al., CVPR workshops 2020).

y = clamp(round((x - β) / s), qmin, qmax) · s + β,  with β kept at a whole number of steps, z = round(-β / s), so that
zero is exact and the result is stored in integers. With v = (x - β) / s

    dx = g                       inside (qmin <= v <= qmax), else 0
    ds = Σ g·(round(v) - v)      inside,  Σ g·qmin below,  Σ g·qmax above
    dβ = Σ g                     outside

ds and dβ times 1 / √(n·qmax), n values per scale. A symmetric spec has no offset: the paper leaves it out for weights.
"""

import torch
from torch import Tensor, nn

from bitwright.methods.base import register_method
from bitwright.methods.clipped import TINY, ClippedMethod, Grid
from bitwright.spec import QuantSpec


@register_method("LSQPlusFakeQuantize", aliases=("lsq+", "lsq_plus", "LSQPlus", "LSQ+", "LSQ_plus"))
class LSQPlusFakeQuantize(ClippedMethod):
    """LSQ+: scale and, for an affine spec, offset (in the units of x) are Parameters.

    Args:
        use_grad_scaling: multiply the gradients of scale and offset by 1 / √(n·qmax).
    """

    scale: nn.Parameter
    offset: nn.Parameter

    def __init__(self, spec: QuantSpec, use_grad_scaling: bool = True) -> None:
        super().__init__(spec, use_grad_scaling)
        self.register_parameter("scale", None)
        if not spec.symmetric:
            self.register_parameter("offset", None)

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        """Begin from the calibrated scale, and the offset -z·s."""
        self.learn("scale", scale)
        if not self.spec.symmetric:
            self.learn("offset", -zero_point * scale)

    def grid(self, zero_point: Tensor) -> Grid:
        """Ends are qmin·s + β and qmax·s + β."""
        step = self.scale.abs() + TINY
        low, high = step * self.spec.qmin, step * self.spec.qmax
        if self.spec.symmetric:
            return Grid(step, low, high, torch.zeros_like(zero_point))
        return Grid(step, low + self.offset, high + self.offset, self.integer(-self.offset / step))
