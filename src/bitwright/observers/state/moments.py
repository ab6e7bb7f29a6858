"""Moments: count, mean, spread and mean magnitude of each channel, batch by batch, mergeable and without cancellation.

n = nA + nB,  d = meanB - meanA,  mean = meanA + d·nB/n,  M2 = M2A + M2B + d²·nA·nB/n     (Chan et al. 1979)
"""

import torch
from torch import Tensor

from bitwright.observers.state.rows import BLOCK, blocks, row_min_max


class Moments:
    """Running moments of (outer, channel, inner) data: sums within a block in float32, across blocks in float64.

    Args:
        needs: what to keep beside the range: ``"spread"`` (mean and M2), ``"magnitude"`` (sum of |x|), ``"nonzero"``.
    """

    def __init__(self, needs: tuple[str, ...] = ("spread", "magnitude", "nonzero")) -> None:
        self.needs = needs
        self.count = 0
        self.mean = self.square = self.magnitude = self.nonzero = torch.zeros(0, dtype=torch.float64)
        self.lo = self.hi = torch.zeros(0)

    def add(self, rows: Tensor) -> None:
        """Take values into account."""
        fresh = Moments(self.needs)
        fresh.lo, fresh.hi = row_min_max(rows)
        fresh.count = rows.shape[0] * rows.shape[2]
        fresh.mean, fresh.square, fresh.magnitude, fresh.nonzero = torch.zeros(
            4, rows.shape[1], dtype=torch.float64, device=rows.device
        )
        counted = torch.zeros_like(fresh.mean)
        # Memory is taken once: fresh memory for each block would cost more than the arithmetic.
        floats, spare = torch.empty(2, min(BLOCK, rows.numel()), device=rows.device)
        for where, block in blocks(rows):
            work = spare[: block.numel()].view(block.shape)
            if block.dtype != torch.float32:
                block = floats[: block.numel()].view(block.shape).copy_(block)
            if "magnitude" in self.needs:
                fresh.magnitude[where] += torch.abs(block, out=work).sum((0, 2))
            if "nonzero" in self.needs:
                fresh.nonzero[where] += (
                    torch.count_nonzero(block, (0, 2)) if len(counted) > 1 else block.count_nonzero()
                )
            if "spread" in self.needs:
                size, mean = block.shape[0] * block.shape[2], block.mean((0, 2))
                square = (
                    torch.linalg.vector_norm(torch.sub(block, mean.unsqueeze(1), out=work), 2, (0, 2)).double().square()
                )
                apart, before = mean - fresh.mean[where], counted[where]
                fresh.square[where] += square + apart.square() * before * size / (before + size)
                fresh.mean[where] += apart * size / (before + size)
                counted[where] += size
        self.merge(fresh)

    def merge(self, other: "Moments") -> None:
        """Take over what another one has seen."""
        if not other.count:
            return
        if not self.count:
            self.__dict__.update(other.__dict__)
            return
        total = self.count + other.count
        apart = other.mean - self.mean
        self.square = self.square + other.square + apart.square() * (self.count * other.count / total)
        self.mean = self.mean + apart * (other.count / total)
        self.magnitude = self.magnitude + other.magnitude
        self.nonzero = self.nonzero + other.nonzero
        self.lo, self.hi = torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi)
        self.count = total

    def std(self) -> Tensor:
        """Standard deviation of each channel (divided by n, so that a single value has one: 0)."""
        return (self.square / self.count).sqrt()

    def mean_magnitude(self) -> Tensor:
        """Mean of |x| of each channel."""
        return self.magnitude / self.count
