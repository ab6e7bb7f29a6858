"""StochasticFakeQuantize: rounding up or down by chance in training, to nearest in evaluation.

y = (clamp(floor(v) + [u < v - floor(v)] + z, qmin, qmax) - z) · s with v = x / s and u uniform in (0, 1): its mean is x
dx = g where round(x / s) + z is in range, else 0
"""

import torch
from torch import Tensor

from bitwright.methods.base import Method, register_method
from bitwright.numerics import quantize_dequantize
from bitwright.numerics.chance import stochastic_quantize
from bitwright.numerics.noise import draw_key


@register_method("StochasticFakeQuantize", aliases=("stochastic",))
class StochasticFakeQuantize(Method):
    """Stochastic rounding: nothing is learned, and no small value is always lost."""

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantize and dequantize ``x``."""
        where = (scale, zero_point, self.spec.qmin, self.spec.qmax, self.axis, self.group)
        if not self.training or torch.compiler.is_exporting():
            return quantize_dequantize(x, *where)
        return stochastic_quantize(x, draw_key(x), *where)
