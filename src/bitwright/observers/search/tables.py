"""The error of candidates that all channels share, as one product of matrices.

A histogram's bins have a power of two for a width, so in units of their span every channel has the same bins, and a
candidate [-top, top] in these units costs every channel the same per value of a bin. With the counts (channels × bins)
and a table of costs (bins × candidates), the errors of all channels are counts @ table.
"""

from functools import lru_cache

import torch
from torch import Tensor

from bitwright.numerics import scale_and_zero_point
from bitwright.spec import QuantSpec

KEPT = 128  # tables in memory, most of them of some hundred kilobytes
COLUMNS = 64  # of a table, so that it stays in cache
TINY = 1e-25  # the least unit: below, every scale is the smallest

Candidate = tuple[float, int, int]  # scale, lowest and highest level


@lru_cache(maxsize=KEPT)
def cost_table(p: float, bins: int, candidates: tuple[Candidate, ...]) -> Tensor:
    """Mean error to the power ``p`` in each of the bins of [-1, 1) for each candidate: (bins, candidates)."""
    scale, lowest, highest = torch.tensor(candidates, dtype=torch.float64).unbind(1)
    edges = torch.linspace(-1, 1, bins + 1, dtype=torch.float64).unsqueeze(1)
    away = edges / scale
    level = away.round().clamp_(lowest, highest)
    away -= level
    integral = level.mul_(2.0**-p).add_(away.pow(3) if p == 2 else away.abs().pow_(p).mul_(away))
    return (integral.diff(dim=0) * (scale ** (p + 1) / (p + 1) * (bins / 2))).float()


def error_table(spec: QuantSpec, p: float, bins: int, tops: tuple[float, ...]) -> Tensor:
    """The table of ranges [-top, top]."""
    return cost_table(p, bins, _symmetric(spec, tops))


@lru_cache(maxsize=2 * KEPT)
def _symmetric(spec: QuantSpec, tops: tuple[float, ...]) -> tuple[Candidate, ...]:
    reach = torch.tensor(tops, dtype=torch.float64)
    scales = scale_and_zero_point(-reach, reach, spec)[0].tolist()
    return tuple((scale, spec.qmin, spec.qmax) for scale in scales)


def shared_errors(counts: Tensor, tops: tuple[float, ...], spec: QuantSpec, p: float) -> Tensor:
    """Errors (channels, candidates) of symmetric ranges that are the same for all channels."""
    return (counts @ error_table(spec, p, counts.shape[1], tops).to(counts.device)).double()
