"""ClippedMethod: the base of methods that learn the step and the ends of a uniform grid (LSQ, LSQ+, PACT, TQT, QDrop).

With v = x / step + zero_point (not rounded), the values are those of ``quantize_dequantize``:

    y = (clamp(round(x / step) + zero_point, qmin, qmax) - zero_point) · step

and the gradients, for a gradient g of y and sums over all values that share a step:

    x     g                    where qmin <= v <= qmax, else 0
    step  Σ g·(round(v) - v)   over qmin <= v <= qmax
    low   Σ g                  over v < qmin
    high  Σ g                  over v > qmax

``low`` and ``high`` are the ends (qmin - z)·step and (qmax - z)·step, but only as where gradients go: a method writes
them in terms of what it learns, and autograd does the rest. LSQ writes ``high = (qmax - z) · scale``, PACT
``high = alpha``. The sums are multiplied by ``factor``; compiled and eager sums may differ in the last bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bitwright.methods.base import Method
from bitwright.methods.options import flag
from bitwright.numerics import Fused, PerScale, PerValue, kernel_operator, quantize_dequantize, total, wide
from bitwright.numerics.qdq import nearest_level
from bitwright.spec import QuantSpec

TINY = 2.0**-60  # added to what must be positive; far below the last bit of any real scale


def clipped_gradients(
    values: Tensor, g: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, step, low and high, in the precision of ``values``."""
    v = torch.div(values, scale)
    position = v + zero_point
    below, above = position < qmin, position > qmax
    inside = torch.where(below | above, 0.0, g)
    return (
        inside,
        total(inside * (torch.round(v) - v)),
        total(torch.where(below, g, 0.0)),
        total(torch.where(above, g, 0.0)),
    )


@Fused
def _gradients(
    x: Tensor, grad: PerValue, scale: PerScale, zero_point: PerScale, qmin: int, qmax: int
) -> tuple[Tensor, ...]:
    inside, *sums = clipped_gradients(wide(x), wide(grad), scale, zero_point, qmin, qmax)
    return inside.to(grad.dtype), *sums


clipped_quantize = kernel_operator("clipped_quantize", nearest_level, _gradients, learned=("scale", "low", "high"))


class Grid(NamedTuple):
    """A uniform grid in terms of what a method learns.

    ``step`` and ``zero_point`` (integers) give the values; gradients go to the step (by rounding) and to the ``low``
    and ``high`` ends (by clipping).
    """

    step: Tensor
    low: Tensor
    high: Tensor
    zero_point: Tensor


class ClippedMethod(Method):
    """Learns a uniform grid; a subclass makes its Parameters in ``start`` and says in ``grid`` what they mean.

    Args:
        use_grad_scaling: multiply the gradients of step and ends by 1 / √(n·qmax), n values per step.
    """

    def __init__(self, spec: QuantSpec, use_grad_scaling: bool) -> None:
        super().__init__(spec)
        self.use_grad_scaling = flag(self, "use_grad_scaling", use_grad_scaling)

    def grid(self, zero_point: Tensor) -> Grid:
        """The grid in force; its tensors carry the gradients to the Parameters."""
        raise NotImplementedError(f"{type(self).__name__} must define what its Parameters mean: write grid(zero_point)")

    def between(self, low: Tensor | None, high: Tensor, zero_point: Tensor) -> Grid:
        """The grid with learned ends: zero stays exact, so step and zero point follow as integers allow.

        Args:
            low: the lower end, None for a symmetric spec.
            high: the upper end.
            zero_point: the calibrated zero point.
        """
        qmin, qmax = self.spec.qmin, self.spec.qmax
        if low is None:
            high = high.abs() + TINY
            return Grid((high / qmax).detach(), high * (qmin / qmax), high, torch.zeros_like(zero_point))
        top, bottom = high.detach().clamp(min=0.0), low.detach().clamp(max=0.0)
        step = (top - bottom) / (qmax - qmin) + TINY
        return Grid(step, low, high, self.integer(qmin - bottom / step))

    def current(self, scale: Tensor, zero_point: Tensor) -> Grid:
        """The grid in force, begun from the calibrated scale if it was not yet."""
        if any(p is None for p in self._parameters.values()):
            self.start(scale, zero_point)
        return self.grid(zero_point)

    def qparams(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            grid = self.current(scale, zero_point)
            return grid.step.float(), grid.zero_point

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        spec = self.spec
        if not self.differentiable(x):
            return quantize_dequantize(x, *self.qparams(scale, zero_point), spec.qmin, spec.qmax, self.axis, self.group)
        grid = self.current(scale, zero_point)
        return self.quantize(x, grid, self.gradient_factor(x, scale) if self.use_grad_scaling else 1.0)

    def quantize(self, x: Tensor, grid: Grid, factor: float) -> Tensor:
        """Quantize and dequantize with gradients; DSQ has its own."""
        return clipped_quantize(x, *grid, self.spec.qmin, self.spec.qmax, factor, self.axis, self.group)

    def integer(self, zero_point: Tensor) -> Tensor:
        """A learned zero point as the integer that is stored."""
        return zero_point.detach().round().clamp(self.spec.qmin, self.spec.qmax).to(torch.int32)
