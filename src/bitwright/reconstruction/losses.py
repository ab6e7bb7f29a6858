"""Losses: how far a unit's results, and the predictions from them, are from the float ones."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def distance(results: Sequence[Any], targets: Sequence[Any], weights: Sequence[Tensor | None]) -> list[Tensor]:
    """The mean of weight · (result - target)² for each result."""
    found = []
    for result, target, weight in zip(results, targets, weights, strict=True):
        if weight is None:
            found.append(F.mse_loss(result, target))
        else:
            found.append(((result - target).square() * weight).mean())
    return found


def prediction_gap(results: Sequence[Any], targets: Sequence[Any], temperature: float = 1.0) -> Tensor:
    """How far the model's results are from the float model's.

    Rows of numbers count as logits: the Kullback-Leibler divergence of the softmax of logits / temperature, on average
    over rows. Other tensors count by their squared error, relative to the target's power.
    """
    terms = []
    for result, target in zip(results, targets, strict=True):
        if result.ndim == 2 and result.shape[1] > 1:
            found, wanted = ((logits / temperature).log_softmax(1) for logits in (result, target))
            terms.append(F.kl_div(found, wanted, reduction="batchmean", log_target=True))
        else:
            power = target.square().mean().clamp_min(1e-12)
            terms.append(F.mse_loss(result, target) / power)
    return torch.stack(terms).sum()
