"""Three ways to choose amax from a histogram of magnitudes."""

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.numerics.amax import bound_of, integers_by_amax, limits_of
from bitwright.numerics.fp8 import BY_BITS, scaled_fp8

CHOICES = ("entropy", "mse", "percentile")
_AT_ONCE = 1 << 22  # elements of the largest temporary
_TIE = 1e-10


def by_percentile(hist: Tensor, edges: Tensor, percentile: float) -> Tensor:
    """The edge below which ``percentile`` per cent of the values lie."""
    if not 0 <= percentile <= 100:
        raise ConfigError(f"Invalid percentile. Must be in range 0 <= percentile <= 100, not {percentile}")
    share = torch.cumsum(hist, 0) / hist.sum()
    place = int(torch.searchsorted(share, torch.tensor(percentile / 100, dtype=share.dtype)))
    return edges[min(place, edges.numel() - 1)].clone()


def by_mse(
    hist: Tensor,
    edges: Tensor,
    num_bits: int | tuple[int, int],
    unsigned: bool,
    stride: int = 1,
    start_bin: int = 128,
) -> Tensor:
    """The bin centre that gives the smallest squared error as amax."""
    centres = (edges[1:] + edges[:-1]) / 2
    tried = centres[_candidates(start_bin, centres.numel(), stride)]
    weights = hist.double()
    errors = []
    for amax in tried.split(max(1, _AT_ONCE // centres.numel())):
        if isinstance(num_bits, tuple):
            values = scaled_fp8(centres.expand(amax.numel(), -1), amax[:, None], BY_BITS[num_bits])
        else:
            q, scale = integers_by_amax(centres, amax[:, None], *limits_of(num_bits, unsigned))
            values = q.div_(scale)
        errors.append(((values - centres).double().square_() * weights).sum(1))
    return tried[int(torch.cat(errors).argmin())].clone()


def by_entropy(
    hist: Tensor,
    edges: Tensor,
    num_bits: int | tuple[int, int],
    unsigned: bool,
    stride: int = 1,
    start_bin: int = 128,
) -> Tensor:
    """The edge that loses least information: the last with the smallest Kullback-Leibler divergence.

    For a cut after i bins, the reference is the first i bins with all that lies beyond added to the last of them. The
    candidate has as many levels as there are integers; all filled bins of a level share its average. Sums over levels
    are differences of running sums, so that all cuts are computed at once.
    """
    if isinstance(num_bits, tuple):
        raise ConfigError(f"entropy counts integers, and num_bits {num_bits} has none: choose 'mse' or 'percentile'")
    levels = int(bound_of(num_bits, unsigned)) + 1
    counts = hist.double().numpy().copy()
    if counts.size > 1:
        counts[0] = counts[1]  # zeros would outweigh everything
    cuts = _candidates(start_bin, counts.size + 1, stride).numpy()
    chunk = max(1, _AT_ONCE // levels)
    divergence = np.concatenate([_divergence(counts, cuts[i : i + chunk], levels) for i in range(0, cuts.size, chunk)])
    if not np.isfinite(divergence).any():
        return edges[int(cuts[-1])].clone()
    best = np.flatnonzero(divergence <= divergence.min() + _TIE)[-1]
    return edges[int(cuts[best])].clone()


def _divergence(counts: np.ndarray, cuts: np.ndarray, levels: int) -> np.ndarray:
    """KL(reference, candidate) for each cut."""

    def running(values: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(values)])

    total, filled = running(counts), running(counts > 0)
    own = running(_xlogx(counts))
    starts = np.ceil(np.linspace(np.zeros(cuts.size), cuts, levels + 1, axis=1)).astype(np.int64)  # (cut, level)
    sums, members = np.diff(total[starts], axis=1), np.diff(filled[starts], axis=1)
    mean = np.divide(sums, members, out=np.zeros_like(sums), where=members > 0)
    last = counts[cuts - 1]
    tail = total[-1] - total[cuts]
    mass = total[cuts]  # of the candidate; that of the reference is everything
    # Where the last bin is empty but gets the tail, the candidate has no mass for it.
    level = np.take_along_axis(mean, np.maximum((np.diff(starts, axis=1) > 0).cumsum(1).argmax(1), 0)[:, None], 1)[:, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        cross = (sums * np.log(np.where(mean > 0, mean, 1.0))).sum(1)
        cross += np.where(tail > 0, tail * np.log(np.where(last > 0, level, 0.0)), 0.0)
        everything = total[-1]
        reference = own[cuts] - _xlogx(last) + _xlogx(last + tail)
        found = (reference - cross) / everything - np.log(everything) + np.log(mass)
    return np.where((mass > 0) & ~np.isnan(found), found, np.inf)


def _xlogx(values: np.ndarray) -> np.ndarray:
    return values * np.log(np.where(values > 0, values, 1.0))


def _candidates(start: int, end: int, stride: int) -> Tensor:
    if stride < 1 or start < 1:
        raise ConfigError(f"stride and start_bin must be at least 1, not {stride} and {start}")
    # A histogram with fewer bins than the start has one candidate, its end.
    return torch.arange(min(start, end - 1), end, stride)
