"""The precision that kernels compute in."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Half precision as float32, the rest as it is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def total(values: Tensor) -> Tensor:
    """Sum canonical values over all but the channel; CPUs use double precision, which is also faster."""
    dtype = torch.float64 if values.device.type == "cpu" else values.dtype
    return (values.sum(dtype=dtype) if values.ndim == 1 else values.sum((0, 2), dtype=dtype)).to(values.dtype)
