"""The symmetric threshold with the least error among given ones, for integers and for fp8."""

import torch
from torch import Tensor

from bitwright.numerics import scale_and_zero_point
from bitwright.observers.search.floating import floating_error, weighted_points
from bitwright.observers.search.samples import Samples, error
from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.spec import PerTensor, QuantSpec


def shares(bins: int, start: int, stride: int) -> Tensor:
    """Return the middles of every ``stride``-th of ``bins`` parts of [0, 1], from ``start`` on, and 1."""
    return torch.cat([torch.arange(start, bins, stride, dtype=torch.float64).add_(0.5) / bins, torch.ones(1)])


def least_error_top(histogram: StreamingHistogram, tops: Tensor, spec: QuantSpec, p: float = 2.0) -> Tensor:
    """Return the best (channels,) of the ranges [-top, top], tops of shape (channels, candidates) in float64."""
    spec = spec.with_(granularity=PerTensor())  # channels are rows here
    if spec.format.floating:
        points, weights = weighted_points(histogram)
        costs = torch.stack([floating_error(points, weights, top, spec, p) for top in tops.float().unbind(1)], 1)
    else:
        samples, unit = Samples.of(histogram, spec, histogram.bins // 2)
        reach = tops / unit.unsqueeze(1)
        costs = error(samples, *scale_and_zero_point(-reach, reach, spec), spec, p)
    return tops.gather(1, costs.argmin(1, keepdim=True)).squeeze(1)
