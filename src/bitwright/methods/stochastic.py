"""StochasticFakeQuantize: rounding up or down by chance in training, to nearest in evaluation.

y = (clamp(floor(v) + [u < v - floor(v)] + z, qmin, qmax) - z) · s with v = x / s and u uniform in (0, 1): its mean is x
dx = g where round(x / s) + z is in range, else 0
"""

import torch
from torch import Tensor

from bitwright.methods.base import Method, register_method
from bitwright.numerics import Fused, PerScale, kernel_operator, quantize_dequantize, wide
from bitwright.numerics.noise import draw_key, noise
from bitwright.numerics.qdq import straight_through
from bitwright.torch_internals import is_exported


@Fused
def _values(x: Tensor, key: Tensor, scale: PerScale, zero_point: PerScale, qmin: int, qmax: int) -> Tensor:
    v = torch.div(wide(x), scale)
    down = torch.floor(v)
    q = torch.where(noise(v, key) < v - down - 0.5, down + 1.0, down)
    return (((q + zero_point).clamp(qmin, qmax) - zero_point) * scale).to(x.dtype)


stochastic_quantize = kernel_operator("stochastic_quantize", _values, straight_through)


@register_method("StochasticFakeQuantize", aliases=("stochastic",))
class StochasticFakeQuantize(Method):
    """Stochastic rounding: learns nothing, and gives every small value a chance to survive."""

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        where = (scale, zero_point, self.spec.qmin, self.spec.qmax, self.axis, self.group)
        if not self.training or is_exported(x):
            return quantize_dequantize(x, *where)
        return stochastic_quantize(x, draw_key(x), *where)
