"""DoReFaFakeQuantize: DoReFa-Net's quantizers (Zhou et al., 2016).

    activations  y = round(n·clip(x, 0, 1)) / n,                                     n = 2^b - 1
    weights      y = 2·round(n·(t / 2 + ½)) / n - 1,   t = tanh(x) / max|tanh(x)|

    dx of activations = g where x rounds to something in [0, 1], else 0
    dx of weights     = g·(1 - tanh²(x)) / m  -  [|x| = max|x|]·sign(x)·(1 - m²)·Σ(g·t) / (k·m)

with m = max|tanh(x)| = tanh(max|x|) over the values that share a step, reached by k of them. Rounding counts as the
identity; the second term flows through the maximum.

The paper's weights lie at odd multiples of 1/n, between integers, so files store them as a table. ``normalize`` rounds
t to the spec's own integers instead, as Sparsebit and MQBench do.
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.methods.base import Method, register_method
from bitwright.methods.options import choice, flag
from bitwright.numerics import (
    Fused,
    PerScale,
    PerValue,
    apply_kernel,
    kernel_operator,
    quantize_dequantize,
    scale_and_zero_point,
    total,
    wide,
)
from bitwright.numerics.hyperbolic import tanh_and_slope
from bitwright.spec import QuantSpec


def _reach(values: Tensor) -> tuple[Tensor, Tensor]:
    """max|x| and m over what shares a step, shaped to broadcast."""
    size = values.abs()
    reach = size.amax() if size.ndim == 1 else size.amax((0, 2)).unsqueeze(1)
    return reach, tanh_and_slope(reach)[0].clamp(min=1e-30)  # a tensor of zeros stays zero


@Fused
def _squeezed(x: Tensor) -> Tensor:
    values = wide(x)
    return (tanh_and_slope(values)[0] / _reach(values)[1]).to(x.dtype)


@Fused
def _values(x: Tensor, scale: PerScale, zero_point: PerScale, qmin: int, qmax: int) -> Tensor:
    values = wide(x)
    _, m = _reach(values)
    q = torch.round(tanh_and_slope(values)[0] * (1.0 / (m * scale)) + zero_point).clamp(qmin, qmax)
    return ((q - zero_point) * scale).to(x.dtype)


def _gradient(x: Tensor, grad: PerValue) -> Tensor:
    values, g = wide(x), wide(grad)
    reach, m = _reach(values)
    t, slope = tanh_and_slope(values)
    many = total((values.abs() == reach).to(values.dtype))
    share = (1.0 - m * m) / (m * m) * (total(g * t) / many).reshape(m.shape)
    part = torch.where(values == reach, share, torch.where(values == -reach, -share, 0.0))
    return (g * slope * (1.0 / m) - part).to(grad.dtype)


# The gradient of the largest value holds a sum.
tanh_quantize = kernel_operator("tanh_quantize", _values, Fused(_gradient, exact=False))


def squeeze(x: Tensor, axis: int | None, group: int | None) -> Tensor:
    """tanh(x) / max|tanh(x)|, without a gradient."""
    return apply_kernel(_squeezed, x, axis=axis, group=group)


@register_method("DoReFaFakeQuantize", aliases=("dorefa", "DoReFa"))
class DoReFaFakeQuantize(Method):
    """DoReFa ignores the calibrated range, which is [-1, 1] or [0, 1] by definition.

    Specs for activations are unsigned or affine.

    Args:
        role: ``"weight"`` or ``"activation"``; by default signed specs are weights.
        normalize: round tanh-normalised weights to the spec's integers, as the earlier toolkits do.
    """

    def __init__(self, spec: QuantSpec, role: str | None = None, normalize: bool = False) -> None:
        super().__init__(spec)
        self.role = choice(self, "role", role or ("weight" if spec.format.signed else "activation"), _ROLES)
        self.normalize = flag(self, "normalize", normalize)
        if self.role == "activation" and spec.format.signed and spec.symmetric:
            raise ConfigError(
                f"DoReFaFakeQuantize clips activations to [0, 1]: ask for 'uint{spec.bits} symmetric', not '{spec}'"
            )
        if self.role == "activation" and normalize:
            raise ConfigError("the option normalize of DoReFaFakeQuantize is for weights; this is for an activation")
        self.uniform = self.role == "activation" or normalize
        self.keeps_size = self.role == "activation"

    def qparams(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """The scale of [0, 1] for activations, of [-1, 1] for weights."""
        one = torch.ones_like(scale, dtype=torch.float32)
        if self.role == "weight" and not self.normalize:
            return one * (2.0 / (2**self.spec.bits - 1)), torch.zeros_like(zero_point)
        return scale_and_zero_point(-one if self.role == "weight" else torch.zeros_like(one), one, self.spec)

    def levels(self) -> Tensor:
        """Half of the odd numbers from -n to n, for the paper's weights."""
        n = 2**self.spec.bits - 1
        return torch.arange(n + 1, dtype=torch.float32) - n / 2

    def integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        if self.role == "weight" and self.uniform:
            x = squeeze(x, self.axis, self.group)
        return super().integers(x, scale, zero_point)

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        step, zero = self.qparams(scale, zero_point)
        ends = (self.spec.qmin, self.spec.qmax)
        if self.role == "activation":
            return quantize_dequantize(x, step, zero, *ends, self.axis, self.group)
        if self.normalize and not self.differentiable(x):
            return quantize_dequantize(squeeze(x, self.axis, self.group), step, zero, *ends, self.axis, self.group)
        if self.normalize:
            return tanh_quantize(x, step, zero, *ends, self.axis, self.group)
        n = 2**self.spec.bits - 1
        return tanh_quantize(x, step, torch.full_like(step, n / 2), 0, n, self.axis, self.group)


_ROLES = ("weight", "activation")
