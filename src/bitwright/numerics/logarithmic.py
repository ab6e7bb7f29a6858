"""Rounding to levels that are powers of a number, both signs and zero (NNIE).

With v = x / largest and r steps per factor of two, m steps in all, r = (m + 1) / 8:

    k = clamp(round(r·log2|v|), -m (x > 0) or 1 - m (x < 0), 0)
    y = largest·sign(v)·2^(k / r),    0 where |v| is at most half the smallest level of its sign, or x < 0 is unsigned

    dx = g everywhere

Eager and compiled logarithms may differ in the last bit.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.operator import WHERE, Arranged, define_operator, wide


@Fused
def _values(x: Tensor, largest: Tensor, constants: Tensor) -> Tensor:
    values = wide(x)
    rate, period, lowest, smallest, negative = constants.unbind()
    v = torch.div(values, largest)
    size = v.abs()
    minus = v < 0
    k = torch.round(rate * torch.log2(size))
    k = torch.maximum(k, torch.where(minus, lowest + 1.0, lowest)).clamp(max=0.0)
    level = torch.exp2(k * period) * largest
    dead = size <= torch.where(minus, negative, smallest)
    return torch.where(dead, 0.0, torch.where(minus, -level, level)).to(x.dtype)


def _forward(
    x: Tensor, largest: Tensor, steps: int, signed: bool, axis: int | None = None, group: int | None = None
) -> Tensor:
    if not x.numel():
        return x.clone()
    at = Arranged.of(x.detach(), axis, group)
    rate = (steps + 1) / 8
    negative = 2.0 ** ((1 - steps) / rate) / 2 if signed else float("inf")
    constants = [rate, 1 / rate, float(-steps), 2.0 ** (-steps / rate) / 2, negative]
    dtype = wide(x).dtype
    made = torch.tensor(constants, dtype=dtype, device=x.device)
    return at.view.restore(_values(at.view.values, at.param(largest.detach()).to(dtype), made))


def _backward(
    grad: Tensor,
    x: Tensor,
    largest: Tensor,
    steps: int,
    signed: bool,
    axis: int | None = None,
    group: int | None = None,
) -> list[Tensor]:
    return [grad.clone()]


logarithmic_quantize = define_operator(
    "logarithmic_quantize",
    f"Tensor largest, int steps, bool signed, {WHERE}",
    _forward,
    _backward,
    learned=0,
)
