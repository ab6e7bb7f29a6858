"""FixedFakeQuantize: scale and zero point stay as calibrated; the gradient is straight-through.

y = (clamp(round(x / s) + z, qmin, qmax) - z) · s,  dy/dx = 1 where round(x / s) + z is in range, else 0
"""

from torch import Tensor

from bitwright.methods.base import Method, register_method
from bitwright.numerics import quantize_dequantize


@register_method("FixedFakeQuantize", aliases=("fixed", "uniform", "ste"))
class FixedFakeQuantize(Method):
    """The plain quantizer: nothing is learned."""

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantize and dequantize ``x``."""
        return quantize_dequantize(x, scale, zero_point, self.spec.qmin, self.spec.qmax, self.axis, self.group)
