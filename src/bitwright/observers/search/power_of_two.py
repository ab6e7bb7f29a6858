"""The search of Vitis' observers: the power of two with the least squared error, at or below the one for min-max.

e0 = ceil(log2(scale of min-max)),   e = argmin over e0, e0 - 1, … e0 - candidates + 1 of mean (x - x_q)²
"""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.numerics import scale_and_zero_point
from bitwright.observers.search.samples import Samples, error
from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.spec import QuantSpec


def check_candidates(candidates: int) -> int:
    """Return the number of exponents to try if it is one."""
    if not 1 <= candidates <= 64:
        raise ConfigError(f"candidates, the number of exponents to try, must be from 1 to 64, not {candidates}")
    return candidates


def best_exponent(histogram: StreamingHistogram, spec: QuantSpec, candidates: int) -> Tensor:
    """The exponent e of the scale 2**e for each channel; the coarsest of equally good ones."""
    lo, hi = (v.unsqueeze(1) for v in histogram.range())
    plain = scale_and_zero_point(lo, hi, spec.with_(power_of_two=False))[0]
    # In float64, and with a hair to spare: a range made for 2**e must not be taken to 2**(e + 1) by rounding.
    coarsest = torch.ceil(torch.log2(plain.double()) - 1e-6)
    exponents = coarsest - torch.arange(candidates, device=lo.device)
    scale = torch.exp2(exponents)
    zero_point = torch.zeros_like(scale)
    if not spec.symmetric:
        zero_point = (spec.qmin - torch.round(lo.clamp(max=0.0) / scale)).clamp(spec.qmin, spec.qmax)
    samples, unit = Samples.of(histogram, spec, histogram.bins // 2)
    costs = error(samples, scale / unit.unsqueeze(1), zero_point, spec, 2.0)
    return exponents.gather(1, costs.argmin(1, keepdim=True)).squeeze(1)
