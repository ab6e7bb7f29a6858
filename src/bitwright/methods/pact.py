"""PACTFakeQuantize: learned clipping of activations (Choi et al., 2018).

y = quantize(clip(x, low, α)) with steps of (α - low) / (qmax - qmin), where low is

    0                 for unsigned symmetric specs (the paper, after a ReLU)
    α·qmin / qmax     for signed symmetric specs
    -n_alpha          for affine specs; n_alpha >= 0 is learned, and kept at a whole number of steps

    dx = g      inside [low, α], else 0
    dα = Σ g    over x > α  (and for signed symmetric specs qmin / qmax · Σ g over x < low)
    dn = -Σ g   over x < -n_alpha

The paper adds λ·α² to the loss: give ``alpha`` its own weight decay if you want that.
"""

import torch
from torch import Tensor, nn

from bitwright.methods.base import register_method
from bitwright.methods.clipped import ClippedMethod, Grid
from bitwright.methods.options import number
from bitwright.spec import QuantSpec


@register_method("PACTFakeQuantize", aliases=("pact", "PACT"))
class PACTFakeQuantize(ClippedMethod):
    """PACT: the clipping value alpha (for affine specs also n_alpha) is a Parameter.

    Args:
        alpha: where to begin (6 and 10 are usual after a ReLU); the calibrated range if not given.
        use_grad_scaling: multiply the gradients of the ends by 1 / √(n·qmax); the paper does not.
    """

    alpha: nn.Parameter
    n_alpha: nn.Parameter

    def __init__(self, spec: QuantSpec, alpha: float | None = None, use_grad_scaling: bool = False) -> None:
        super().__init__(spec, use_grad_scaling)
        self.initial = None if alpha is None else number(self, "alpha", alpha, 1e-6, float("inf"))
        self.register_parameter("alpha", None)
        if not spec.symmetric:
            self.register_parameter("n_alpha", None)

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        """Begin from the calibrated range, or from ``alpha`` on both sides of what has two."""
        high, low = (self.spec.qmax - zero_point) * scale, (zero_point - self.spec.qmin) * scale
        if self.initial is not None:
            high = torch.full_like(high, self.initial)
            low = torch.where(low > 0, self.initial, 0.0)
        self.learn("alpha", high)
        if not self.spec.symmetric:
            self.learn("n_alpha", low)

    def grid(self, zero_point: Tensor) -> Grid:
        return self.between(None if self.spec.symmetric else -self.n_alpha, self.alpha, zero_point)
