"""Clip: limits values to a range whose ends may be learned."""

import torch
from torch import Tensor, nn

from bitwright.compat.pytorch_quantization.nn.functional import clip
from bitwright.errors import ConfigError


class Clip(nn.Module):
    """Clips to ``[clip_value_min, clip_value_max]``; an end to learn is a single number and becomes a Parameter."""

    clip_value_min: Tensor
    clip_value_max: Tensor

    def __init__(
        self,
        clip_value_min: float | Tensor,
        clip_value_max: float | Tensor,
        learn_min: bool = False,
        learn_max: bool = False,
    ) -> None:
        super().__init__()
        ends = {"clip_value_min": (clip_value_min, learn_min), "clip_value_max": (clip_value_max, learn_max)}
        for name, (given, learned) in ends.items():
            value = torch.as_tensor(given, dtype=torch.float32).detach().clone()
            if learned and value.numel() != 1:
                raise ConfigError(f"{name} is learned: it must be scalar, not a tensor of shape {tuple(value.shape)}")
            if learned:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def forward(self, inputs: Tensor) -> Tensor:
        return clip(inputs, self.clip_value_min, self.clip_value_max)

    def extra_repr(self) -> str:
        ends = (self.clip_value_min, self.clip_value_max)
        return ", ".join(f"{float(e):.4g}" if e.numel() == 1 else f"{tuple(e.shape)}" for e in ends)


__all__ = ["Clip"]
