"""Probe nets for the matrix of backends: what networks are made of, as small as it can be."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Residual sums with and without a layer in the skip branch, a layer called twice, concatenation, deconvolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.second, self.skip = (nn.Conv2d(8, 8, k, padding=k // 2) for k in (3, 3, 1))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.twice = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.stem(x))), 2)
        y = torch.relu(self.first(x) + x)
        y = torch.relu(self.second(y) + self.skip(x))
        y = F.relu6(self.up(torch.cat([y, x], 1))) + F.interpolate(y, scale_factor=2.0)
        y = torch.relu(self.twice(torch.relu(self.twice(y))))
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Gated(nn.Module):
    """A depthwise layer, hard-swish, and a gate of sigmoids on channels; the result is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.depthwise(F.hardswish(self.expand(x))))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(F.avg_pool2d(y, 2).mean((2, 3), keepdim=True)))))
        return self.project(y * gate)


class Block(nn.Module):
    """A transformer block on sequences of any length."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


class Recurrent(nn.Module):
    """Tokens, an LSTM, and a classifier of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states[:, -1])


class Everything(nn.Module):
    """All of them, in one file."""

    def __init__(self) -> None:
        super().__init__()
        self.residual, self.gated, self.block, self.recurrent = Residual(), Gated(), Block(), Recurrent()

    def forward(self, image: Tensor, sequence: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.residual(image), self.gated(image), self.block(sequence), self.recurrent(tokens)


NETS: dict[str, type[nn.Module]] = {"residual": Residual, "gated": Gated, "block": Block, "recurrent": Recurrent}


def inputs(net: nn.Module, length: int = 6, seed: int = 1) -> tuple[Tensor, ...]:
    """Two samples for a net; ``length`` is that of sequences."""
    random = torch.Generator().manual_seed(seed)
    image = torch.randn(2, 3, 8, 8, generator=random)
    sequence = torch.randn(2, length, 16, generator=random)
    tokens = torch.randint(0, 12, (2, length), generator=random)
    given = {Block: (sequence,), Recurrent: (tokens,), Everything: (image, sequence, tokens)}
    return given.get(type(net), (image,))


def built(kind: type[nn.Module]) -> nn.Module:
    """A net with a fixed seed, whose BatchNorms have seen data."""
    torch.manual_seed(0)
    net = kind().train()
    with torch.no_grad():
        for seed in range(3):
            net(*inputs(net, seed=seed))
    return net.eval()
