"""Functions that modules are made of."""

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.methods import amax


def clip(x: Tensor, clip_value_min: Tensor | float, clip_value_max: Tensor | float) -> Tensor:
    """Clip ``x``; a learned end must be a single number, and gets the sum of the gradients beyond it."""
    ends = [torch.as_tensor(end, device=x.device) for end in (clip_value_min, clip_value_max)]
    for end in ends:
        if end.requires_grad and end.numel() != 1:
            raise ConfigError(
                f"an end of clip that is learned can only be scalar, not a tensor of shape {tuple(end.shape)}"
            )
    return amax.clip(x, *ends)


__all__ = ["clip"]
