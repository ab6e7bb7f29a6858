"""Fp8FakeQuantize: rounds to the nearest number of an fp8 format."""

from torch import Tensor

from bitwright.methods.base import Method, register_method
from bitwright.numerics.fp8 import BY_NAME, fp8_quantize_dequantize, to_fp8
from bitwright.numerics.views import broadcast


@register_method("Fp8FakeQuantize")
class Fp8FakeQuantize(Method):
    """``y = fp8(x / scale) * scale``, saturating; the gradient passes within the range."""

    uniform = False

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Round to fp8 and back."""
        return fp8_quantize_dequantize(x, scale, self.spec.format.name, self.axis, self.group)

    def integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The fp8 numbers that ``x`` is stored as."""
        return to_fp8(x / broadcast(scale, x, self.axis, self.group), BY_NAME[self.spec.format.name])
