"""ChannelLimit: a ReLU with an upper limit for each channel."""

import torch
from torch import Tensor, nn


class ChannelLimit(nn.Module):
    """min(max(x, 0), high), with ``high`` shaped to lie along the channels: (C, 1, 1) for images."""

    def __init__(self, high: Tensor) -> None:
        super().__init__()
        self.register_buffer("high", high)

    def forward(self, x: Tensor) -> Tensor:
        """Limit each channel."""
        return torch.minimum(torch.relu(x), self.high)

    @property
    def lowest(self) -> float:
        """The limit that no channel is below."""
        return float(self.high.min())
