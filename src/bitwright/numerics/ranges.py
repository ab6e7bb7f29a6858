"""From a range of values to a scale and a zero point.

    affine      scale = (hi - lo) / (qmax - qmin),  zero_point = qmin - round(lo / scale),  with lo <= 0 <= hi
    symmetric   scale = max(-lo, hi) / qmax,        zero_point = 0
    power of two   scale becomes 2 ** round(log2(scale))

Zero always maps to zero exactly, and a range of width zero gets a tiny scale that is not zero.
"""

import torch
from torch import Tensor

from bitwright.spec import QuantSpec

SMALLEST_SCALE = 2.0**-60  # the product of two of them, the scale of a bias, is still a normal float32


def scale_and_zero_point(lo: Tensor, hi: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return float32 scale and int32 zero point for values in [lo, hi], in the shape of ``lo`` and ``hi``."""
    lo, hi = lo.float().clamp(max=0.0), hi.float().clamp(min=0.0)
    if spec.symmetric:
        return symmetric_scale(torch.maximum(-lo, hi) if spec.format.signed else hi, spec)
    # Halving first keeps hi - lo finite for ranges near the largest float.
    scale = _usable((hi / 2 - lo / 2) / (spec.qmax - spec.qmin) * 2, spec)
    zero_point = spec.qmin - torch.round(lo / scale)
    return scale, zero_point.clamp(spec.qmin, spec.qmax).to(torch.int32)


def symmetric_scale(amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return the scale, in the precision of ``amax``, and a zero point of 0 for magnitudes up to ``amax``."""
    scale = _usable(amax / spec.qmax, spec)
    return scale, torch.zeros_like(scale, dtype=torch.int32)


def _usable(scale: Tensor, spec: QuantSpec) -> Tensor:
    scale = scale.clamp(min=SMALLEST_SCALE)
    return torch.exp2(torch.round(torch.log2(scale))) if spec.power_of_two else scale
