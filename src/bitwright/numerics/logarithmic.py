"""Rounding to levels that are powers of a number, both signs and zero (NNIE).

With v = x / largest and r steps per factor of two, m steps in all, r = (m + 1) / 8:

    k = clamp(round(r·log2|v|), -m (x > 0) or 1 - m (x < 0), 0)
    y = largest·sign(v)·2^(k / r),    0 where |v| is at most half the smallest level of its sign, or x < 0 is unsigned

    dx = g everywhere

In float32 logarithms and powers are sums and products, so that eager and compiled kernels give the same bits; double
precision asks torch.
"""

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.operator import WHERE, Arranged, define_operator, wide


def _log2(x: Tensor) -> Tensor:
    """log2(x) for x from 2⁻⁹ to 1, within 1e-6."""
    if x.dtype == torch.float64:
        return torch.log2(x)
    whole = torch.zeros_like(x)
    for power in (4.0, 2.0, 1.0, 1.0):  # bring x to [½, 1]
        small = x < 2.0**-power
        x, whole = torch.where(small, x * 2.0**power, x), torch.where(small, whole - power, whole)
    y = (x - 0.70710678) / (x + 0.70710678)  # |y| < 0.172: log2(x) + ½ = 2·artanh(y) / ln 2
    w = y * y
    series = (((0.32059889 * w + 0.41219858) * w + 0.57707802) * w + 0.96179669) * w + 2.8853901
    return whole + (series * y - 0.5)


def _exp2(x: Tensor) -> Tensor:
    """2^x for x from -8 to 0, within 3e-7, exact for whole numbers."""
    if x.dtype == torch.float64:
        return torch.exp2(x)
    whole = torch.round(x)
    f = x - whole
    series = ((1.5252734e-05 * f + 1.5403530e-04) * f + 1.3333558e-03) * f + 9.6181291e-03
    result = (((series * f + 5.5504109e-02) * f + 2.4022651e-01) * f + 6.9314718e-01) * f + 1.0
    for power in (4.0, 2.0, 1.0, 1.0):
        large = whole <= -power
        result, whole = torch.where(large, result * 2.0**-power, result), torch.where(large, whole + power, whole)
    return result


@Fused
def _values(x: Tensor, largest: Tensor, constants: Tensor) -> Tensor:
    values = wide(x)
    rate, period, lowest, smallest, negative = constants.unbind()
    v = torch.div(values, largest)
    size = v.abs()
    minus = v < 0
    k = torch.round(rate * _log2(size.clamp(2.0**-9, 1.0)))
    k = torch.maximum(k, torch.where(minus, lowest + 1.0, lowest))
    level = _exp2(k * period) * largest
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
