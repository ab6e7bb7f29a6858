"""Small nets with every kind of unit, and data for them."""

import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)


class Inverted(nn.Module):
    """An inverted residual; with another number of channels it has no shortcut."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()),
            *(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6()),
            *(nn.Conv2d(16, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.joins = inputs == outputs

    def forward(self, x):
        return x + self.body(x) if self.joins else self.body(x)


def residual_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Residual(8), Residual(8), *_head(8))


def inverted_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU6(), Inverted(8, 8), Inverted(8, 12), *_head(12))


def _head(channels):
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)


class Kinds(nn.Module):
    """Layers of all ranks, grouped, transposed, functional, one called twice; two inputs and two results."""

    def __init__(self):
        super().__init__()
        self.grouped, self.up = nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.line, self.solid = nn.Conv1d(4, 4, 3, padding=1), nn.Conv3d(1, 2, 3, padding=1)
        self.weight, self.twice = nn.Parameter(torch.randn(6, 4) * 0.3), nn.Linear(6, 6)

    def forward(self, x, bias):
        x = self.up(torch.relu(self.grouped(x)))
        solid = self.solid(x[:, None]).mean((1, 2))
        flat = torch.relu(self.line(x.flatten(2))).mean(2)
        y = F.linear(flat, self.weight) + bias
        return self.twice(torch.relu(self.twice(y))), solid


class Attention(nn.Module):
    """A transformer block with a mask that every block reads."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 4 + mask, -1)
        x = x + self.out(weights @ v)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attention(8), Attention(8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.mean(1))


class Dense(nn.Module):
    """Each layer reads all results before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        seen = [torch.relu(x)]
        for layer in self.layers:
            seen.append(torch.relu(layer(torch.cat(seen, 1))))
        return self.head(torch.cat(seen, 1))


class Island(nn.Module):
    """Looks at its data, so its forward cannot be captured."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.second(x if x.sum() > 0 else x * 2).mean((2, 3))


class Outer(nn.Module):
    """A graph that calls an island."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Island(), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.relu(self.inner(x)))


def images(count=16, channels=3, size=8):
    return torch.randn(count, channels, size, size)


NETS = {
    "residual": (residual_net, lambda: (images(),)),
    "inverted": (inverted_net, lambda: (images(),)),
    "kinds": (Kinds, lambda: (images(8, 4, 4), torch.randn(8, 6))),
    "transformer": (Transformer, lambda: (torch.randn(8, 6, 8), torch.zeros(8, 6, 6))),
    "dense": (Dense, lambda: (images(8, 4),)),
    "island": (Island, lambda: (images(8),)),
    "outer": (Outer, lambda: (images(8),)),
}


def calibrated(name, recipe="W4A8"):
    """A net with statistics and few bits, and two batches of data."""
    torch.manual_seed(0)
    make, data = NETS[name]
    model = make()
    batches = [data(), data()]
    for _ in range(5):
        model.train()(*data())
    recipe = {"backend": "virtual", "weight": "int3 channel:0"} if name == "kinds" else recipe
    return bw.calibrate(bw.prepare(model.eval(), batches[0], recipe=recipe), batches, correct=False), batches
