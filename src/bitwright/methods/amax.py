"""AmaxFakeQuantize: the method of a QuantDescriptor. It rounds as FixedFakeQuantize does; its ends can be learned.

With ``learn``, values are clipped to [clip_value_min, clip_value_max], and with amax = max(-clip_value_min,
clip_value_max) rounded in steps of amax / qmax. As in PACT,

    dx = g inside the ends, else 0;   d clip_value_min = Σ g below,   d clip_value_max = Σ g above
"""

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.methods.base import register_method
from bitwright.methods.fixed import FixedFakeQuantize
from bitwright.numerics import scale_and_zero_point
from bitwright.spec import QuantSpec


@register_method("AmaxFakeQuantize", aliases=("amax",))
class AmaxFakeQuantize(FixedFakeQuantize):
    """Rounds to integers or fp8, and refuses negative values for an unsigned format.

    Args:
        spec: what the quantized tensor looks like; symmetric.
        learn: make the ends of the range Parameters, one pair for the tensor.
        real: return integers, as floats, instead of the values they stand for.

    Attributes:
        rounds: whether values are rounded, or only clipped to learned ends.
        clips: whether the ends go on being learned, and clip where values are not rounded.
        multiplier: with ``real``, what the last values were multiplied by; ``integers / multiplier`` goes back.
    """

    clip_value_min: nn.Parameter
    clip_value_max: nn.Parameter

    def __init__(self, spec: QuantSpec, learn: bool = False, real: bool = False) -> None:
        super().__init__(spec)
        self.has_range, self.real, self.rounds, self.clips = learn, real, True, False
        self.multiplier: Tensor | None = None
        if learn:
            self.clip_value_min, self.clip_value_max = nn.Parameter(-torch.ones(())), nn.Parameter(torch.ones(()))

    @property
    def uniform(self) -> bool:  # pyrefly: ignore
        """Whether results lie on the grid."""
        return self.rounds and not self.real and super().uniform

    def limits(self) -> tuple[Tensor, Tensor] | None:
        """The learned ends, where they are not those of the grid."""
        even = not self.has_range or bool(-self.clip_value_min == self.clip_value_max)
        return None if even else (self.clip_value_min.detach(), self.clip_value_max.detach())

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        if self.has_range and scale.numel():
            self.begin(scale.max() * self.spec.qmax)

    def begin(self, amax: Tensor) -> None:
        """Begin learning from ``amax``."""
        with torch.no_grad():
            self.clip_value_min.copy_(-amax)
            self.clip_value_max.copy_(amax)

    def qparams(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """The step of the learned ends, or the calibrated one."""
        if not self.has_range:
            return scale, zero_point
        return scale_and_zero_point(self.clip_value_min.detach(), self.clip_value_max.detach(), self.spec)

    def integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        return super().integers(self.clipped(x), *self.qparams(scale, zero_point))

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Clip to the ends if they are learned, then quantize and dequantize."""
        x = self.clipped(x)
        if not self.rounds:
            return x
        if not self.spec.format.signed:
            check_not_negative(x)
        params = self.qparams(scale, zero_point)
        y = super().forward(x, *params)
        if not self.real:
            return y
        self.multiplier = params[0].reciprocal()
        return y - y.detach() + super().integers(x.detach(), *params).to(x.dtype)  # the gradient is that of y

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save learned ends under the name that pytorch-quantization gives them."""
        super()._save_to_state_dict(destination, f"{prefix.removesuffix('method.')}clip.", keep_vars)

    def clipped(self, x: Tensor) -> Tensor:
        """``x`` between the learned ends, if there are any."""
        return clip(x, self.clip_value_min, self.clip_value_max) if self.has_range else x


def clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Clip ``x``; an end that is learned gets the sum of the gradients that lie beyond it."""
    return torch.where(x < low, low.to(x.dtype), torch.where(x > high, high.to(x.dtype), x))


def check_not_negative(x: Tensor) -> None:
    """Refuse negative values for an unsigned format."""
    if x.numel() and not torch.compiler.is_compiling() and bool((x < 0).any()):
        raise TypeError(
            f"Negative values encountered in unsigned quantization: the lowest is {float(x.min()):.4g}; "
            "use unsigned=False for this tensor"
        )
