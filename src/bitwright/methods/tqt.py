"""TqtFakeQuantize: trained quantization thresholds (Jain et al., MLSys 2020).

The scale is a power of two and follows the threshold t, whose logarithm is learned:

    s = 2^ceil(log2 t) / 2^(b-1)   (signed; 2^b unsigned),      y = clamp(round(x / s), qmin, qmax) · s

    dx        = g                                     inside (qmin <= x / s <= qmax), else 0
    d(log2 t) = s·ln2 · (Σ g·(round(v) - v) inside,  Σ g·qmin below,  Σ g·qmax above)     with v = x / s

ceil counts as the identity. The paper trains log2 t with Adam, which does not mind the gradient's size. For SGD it is
multiplied by 1 / (√(n·qmax)·(s·ln2)²), n values per scale: then the scale moves as LSQ's does at the same rate. It is
also kept within [-1, 1], since a step that is large for a logarithm cannot be made up for.

It begins in the middle of the thresholds whose scale is the power of two nearest to the calibrated one, so that the
first steps do not double it.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.methods.base import register_method
from bitwright.methods.clipped import ClippedMethod, Grid
from bitwright.methods.options import need_symmetric
from bitwright.spec import QuantSpec

_LOWEST, _HIGHEST = -60.0, 60.0


class _Calmed(torch.autograd.Function):
    """The identity, whose gradient is divided by ``size``² and clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(size)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (size,) = ctx.saved_tensors
        return (grads[0] / size.square()).clamp(-1.0, 1.0), None


@register_method("TqtFakeQuantize", aliases=("tqt", "TQT", "TQTFakeQuantize"))
class TqtFakeQuantize(ClippedMethod):
    """TQT: log2 of the threshold is a Parameter; scales are powers of two, specs symmetric.

    Args:
        use_grad_scaling: scale the gradient as above; the paper, with Adam, does not.
    """

    log2_threshold: nn.Parameter

    def __init__(self, spec: QuantSpec, use_grad_scaling: bool = True) -> None:
        need_symmetric(self, spec)
        super().__init__(spec, use_grad_scaling)
        self.magnitude_bits = spec.bits - int(spec.format.signed)  # log2 of the levels on one side
        self.register_parameter("log2_threshold", None)

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        """Begin in the middle of the thresholds whose scale is nearest to the calibrated one."""
        self.learn("log2_threshold", torch.round(torch.log2(scale.float())) + self.magnitude_bits - 0.5)

    def grid(self, zero_point: Tensor) -> Grid:
        """Ends are qmin·s and qmax·s; s is a function of log2 t."""
        log2 = self.log2_threshold
        whole = torch.ceil(log2.detach()).clamp(_LOWEST, _HIGHEST)
        if self.use_grad_scaling:
            log2 = _Calmed.apply(log2, torch.exp2(whole - self.magnitude_bits) * math.log(2.0))
        step = torch.exp2(log2 + (whole - log2).detach() - self.magnitude_bits)
        # exp2 of a whole number must be that power exactly, wherever it runs
        exact = torch.ldexp(torch.ones_like(whole), (whole - self.magnitude_bits).to(torch.int32))
        step = step + (exact - step).detach()
        return Grid(step, step * self.spec.qmin, step * self.spec.qmax, torch.zeros_like(zero_point))
