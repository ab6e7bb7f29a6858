"""DoReFaFakeQuantize: DoReFa-Net's quantizers (Zhou et al., 2016).

    activations  y = round(n·clip(x, 0, 1)) / n,                                     n = 2^b - 1
    weights      y = 2·round(n·(t / 2 + ½)) / n - 1,   t = tanh(x) / max|tanh(x)|

    dx of activations = g where x rounds to something in [0, 1], else 0
    dx of weights     = g·dt/dx, through tanh and the maximum; formula in :mod:`bitwright.numerics.tanh`

The paper's weights lie at odd multiples of 1/n, between integers: they are not stored as integers. ``normalize`` rounds
t to the spec's own integers instead, as Sparsebit and MQBench do: that can be exported.
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.methods.base import Method, register_method
from bitwright.methods.options import choice, flag
from bitwright.numerics import quantize, quantize_dequantize, scale_and_zero_point
from bitwright.numerics.tanh import squeeze, tanh_quantize
from bitwright.spec import QuantSpec

_NAME = "DoReFaFakeQuantize"


@register_method(_NAME, aliases=("dorefa", "DoReFa"))
class DoReFaFakeQuantize(Method):
    """DoReFa: nothing is learned, and the calibrated range is not used: it is [-1, 1] or [0, 1] by definition.

    Args:
        spec: what the quantized tensor looks like; unsigned, or affine, for activations.
        role: ``"weight"`` or ``"activation"``; by default signed specs are weights.
        normalize: round tanh-normalised weights to the spec's integers, as the earlier toolkits do.
    """

    def __init__(self, spec: QuantSpec, role: str | None = None, normalize: bool = False) -> None:
        super().__init__(spec)
        self.role = choice(_NAME, "role", role or ("weight" if spec.format.signed else "activation"), _ROLES)
        self.normalize = flag(_NAME, "normalize", normalize)
        if self.role == "activation" and spec.format.signed and spec.symmetric:
            raise ConfigError(f"{_NAME} clips activations to [0, 1]: ask for 'uint{spec.bits} symmetric', not '{spec}'")
        if self.role == "activation" and normalize:
            raise ConfigError(f"the option normalize of {_NAME} is for weights; this is for an activation")
        self.uniform = self.role == "activation" or normalize

    def qparams(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """The scale of [0, 1] for activations, of [-1, 1] for weights."""
        one = torch.ones_like(scale, dtype=torch.float32)
        if self.role == "weight" and not self.normalize:
            return one * (2.0 / (2**self.spec.bits - 1)), torch.zeros_like(zero_point)
        return scale_and_zero_point(-one if self.role == "weight" else torch.zeros_like(one), one, self.spec)

    def integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The integers of x, or of its tanh normalised."""
        if self.role == "activation" or not self.uniform:
            return super().integers(x, scale, zero_point)
        spec, params = self.spec, self.qparams(scale, zero_point)
        t = squeeze(x, self.axis, self.group)
        return quantize(t, *params, spec.qmin, spec.qmax, self.axis, self.group, dtype=spec.format.storage)

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantize and dequantize ``x``."""
        step, zero = self.qparams(scale, zero_point)
        ends = (self.spec.qmin, self.spec.qmax)
        if self.role == "activation":
            return quantize_dequantize(x, step, zero, *ends, self.axis, self.group)
        if self.normalize and not self.differentiable:
            return quantize_dequantize(squeeze(x, self.axis, self.group), step, zero, *ends, self.axis, self.group)
        if self.normalize:
            return tanh_quantize(x, step, zero, *ends, self.axis, self.group)
        n = 2**self.spec.bits - 1
        return tanh_quantize(x, step, torch.full_like(step, n / 2), 0, n, self.axis, self.group)


_ROLES = ("weight", "activation")
