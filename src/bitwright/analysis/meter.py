"""Meter: accumulate, in float64 and O(bins) memory, statistics of one tensor over all batches."""

import math

import torch
from torch import Tensor

from bitwright.analysis.stats import Histogram, TensorStats
from bitwright.numerics.precision import wide
from bitwright.numerics.views import broadcast
from bitwright.quantizer import TensorQuantizer


class Meter:
    """Sees a tensor of the float model, compares it with the quantized model's, and counts its values if wanted."""

    def __init__(self, quantizer: TensorQuantizer | None, *, histogram: bool = True) -> None:
        self.quantizer = quantizer if quantizer is not None and quantizer.calibrated else None
        self.signal = self.noise = 0.0
        self.values = self.clipped = self.compared = 0
        self.wants_histogram = histogram
        self.histogram: Histogram | None = None

    def look(self, x: Tensor) -> None:
        """See values of the float model."""
        if not x.numel():
            return
        self.values += x.numel()
        if self.quantizer is not None:
            self.clipped += count_clipped(x, self.quantizer)
        if self.wants_histogram:
            self._count(x)

    def _count(self, x: Tensor) -> None:
        bounds = [float(v) for v in torch.aminmax(x)]
        if not all(math.isfinite(b) for b in bounds):
            x = x[torch.isfinite(x)]
            if not x.numel():
                return
            bounds = [float(v) for v in torch.aminmax(x)]
        if self.histogram is None:
            known = range_of(self.quantizer) or ()
            self.histogram = Histogram.over(min(*bounds, *known), max(*bounds, *known))
        self.histogram.add(x)

    def compare(self, x: Tensor, y: Tensor) -> None:
        """See values ``x`` of the float model with ``y`` of the quantized one."""
        x, y = wide(x), wide(y)
        error = x - y
        powers = [_power(x), _power(error)]
        if not all(math.isfinite(p) for p in powers):
            finite = torch.isfinite(error)  # such as -inf in an attention mask, which carries no signal
            powers = [_power(x[finite]), _power(error[finite])]
        self.signal, self.noise = self.signal + powers[0], self.noise + powers[1]
        self.compared += x.numel()

    def fill(self, stats: TensorStats) -> None:
        """Record what was seen."""
        if self.compared:
            stats.sqnr = sqnr(self.signal, self.noise)
        if self.values and self.quantizer is not None:
            stats.clipped = self.clipped / self.values
        if self.histogram is not None:
            stats.histogram = self.histogram.trimmed(range_of(self.quantizer))


def sqnr(signal: float, noise: float) -> float:
    """The ratio of two powers in dB; infinite where there is no noise."""
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal else -math.inf


def count_clipped(x: Tensor, quantizer: TensorQuantizer) -> int:
    """The number of values that round to an integer outside the spec."""
    method, spec, x = quantizer.method, quantizer.spec, wide(x)
    scale, zero_point = (broadcast(p.detach(), x, method.axis, method.group) for p in quantizer.qparams())
    q = torch.round(x / scale) + zero_point
    return int(((q < spec.qmin) | (q > spec.qmax)).sum())


def range_of(quantizer: TensorQuantizer | None) -> tuple[float, float] | None:
    """The lowest and highest value that a calibrated quantizer represents, over all its channels."""
    if quantizer is None or not quantizer.calibrated:
        return None
    lo, hi = quantizer.range()
    return float(lo.min()), float(hi.max())


def _power(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
