"""FixedFakeQuantize: scale and zero point stay as calibrated; the gradient is straight-through.

y = (clamp(round(x / s) + z, qmin, qmax) - z) · s,  dy/dx = 1 where round(x / s) + z is in range, else 0

For an fp8 format, y = fp8(x / s) · s, saturating; the gradient passes within the range.
"""

from torch import Tensor

from bitwright.methods.base import Method, register_method
from bitwright.numerics import quantize, quantize_dequantize
from bitwright.numerics.fp8 import BY_NAME, fp8_quantize_dequantize, to_fp8
from bitwright.numerics.views import broadcast


@register_method("FixedFakeQuantize", aliases=("fixed", "uniform", "ste"))
class FixedFakeQuantize(Method):
    """The plain quantizer: nothing is learned."""

    floating = True

    @property
    def uniform(self) -> bool:  # pyrefly: ignore
        """Whether the numbers are integers."""
        return not self.spec.format.floating

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        spec = self.spec
        if spec.format.floating:
            return fp8_quantize_dequantize(x, scale, spec.format.name, self.axis, self.group)
        return quantize_dequantize(x, scale, zero_point, spec.qmin, spec.qmax, self.axis, self.group)

    def integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        spec = self.spec
        if spec.format.floating:
            return to_fp8(x / broadcast(scale, x, self.axis, self.group), BY_NAME[spec.format.name])
        return quantize(x, scale, zero_point, spec.qmin, spec.qmax, self.axis, self.group, dtype=spec.format.storage)
