"""What the tests of schedules share: nets with any forward, norms of other people's, and the notes of a schedule."""

import torch
from torch import nn

import bitwright as bw


class Net(nn.Module):
    """Any forward over any layers."""

    def __init__(self, body, **layers):
        super().__init__()
        self.body = body
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args):
        return self.body(self, *args)


class FrozenNorm(nn.Module):
    """A norm of buffers, written out."""

    def __init__(self, channels):
        super().__init__()
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x):
        scale = self.weight.reshape(1, -1, 1, 1) * (self.running_var.reshape(1, -1, 1, 1) + 1e-5).rsqrt()
        return x * scale + (self.bias.reshape(1, -1, 1, 1) - self.running_mean.reshape(1, -1, 1, 1) * scale)


def shuffle_channels(x, groups=2):
    """As ShuffleNet does it."""
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


def notes_of(model, name):
    """What one schedule said."""
    return [n.removeprefix(f"{name}: ") for n in bw.ledger_of(model).notes if n.startswith(f"{name}: ")]
