"""Values by their rank: each row in order, or only the few at an end that a tail's quantile needs."""

import numpy as np
import torch
from torch import Tensor

FEW = 16  # ranks from an end, up to which they are selected instead of sorted


def in_order(values: Tensor) -> Tensor:
    """Each row of (channels, values) from the least to the greatest."""
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return values.sort(dim=1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=1))  # many times as fast as torch's on a processor


def at_places(values: Tensor, places: Tensor) -> Tensor:
    """Of each row of (channels, values), those that would be at (channels, places) if it were in order."""
    last = values.shape[1] - 1
    low, high = int(places.min()), int(places.max())
    if high < FEW:
        return values.topk(high + 1, dim=1, largest=False).values.gather(1, places)
    if last - low < FEW:
        return values.topk(last - low + 1, dim=1).values.gather(1, last - places)
    return in_order(values).gather(1, places)
