"""Nets of what larger ones are put together from: reused blocks, tied weights, experts, features, generators."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.zoo.case import member
from tests.zoo.text import token_ids


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Conv2d(width, 2 * width, 3, padding=1), nn.Conv2d(2 * width, width, 1)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


@member(size=12, other=16)
class Reused(nn.Module):
    """One block called four times, on a residual that grows with each call."""

    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.Linear(8, 5)
        self.block.down.weight.data.mul_(12)

    def forward(self, x):
        x = self.stem(x)
        for _ in range(4):
            x = self.block(x)
        return self.head(x.mean((2, 3)))


@member(size=8, other=12)
class ManyClasses(nn.Module):
    """A classifier of ten thousand classes."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10_000)

    def forward(self, x):
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


@member(token_ids, 6, 9)
class Tied(nn.Module):
    """The head has the embedding's weight; the others' weights are read for a device, a type and their values."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids):
        x = self.embed(input_ids)
        ones = torch.ones(x.shape[1], 1, device=self.up.weight.device, dtype=self.down.weight.dtype)
        x = self.down(F.relu(self.up(x))) + x * ones + F.linear(x, self.up.weight).relu() @ self.up.weight
        return self.head(x) * self.down.weight.abs().mean()


class Padded(nn.Conv2d):
    """A subclass that changes its arguments only."""

    def __init__(self, source, target, kernel):
        super().__init__(source, target, kernel, padding=kernel // 2, bias=False)


@member(size=12, other=16)
class Parametrized(nn.Module):
    """Weight norm, spectral norm, and a subclassed convolution before a norm."""

    def __init__(self):
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.second, self.norm = Padded(8, 16, 3), nn.BatchNorm2d(16)
        self.third = parametrizations.spectral_norm(nn.Conv2d(16, 8, 1))
        self.head = parametrizations.weight_norm(nn.Linear(8, 5))

    def forward(self, x):
        x = F.relu(self.norm(self.second(F.relu(self.first(x)))))
        return self.head(F.relu(self.third(x)).mean((2, 3)))


@member(token_ids, 6, 9)
class Experts(nn.Module):
    """A mixture of experts: each token goes to the two that its gate prefers, and some get none."""

    def __init__(self):
        super().__init__()
        self.embed, self.gate = nn.Embedding(50, 16), nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            mixed.index_add_(0, tokens, expert(flat[tokens]) * weights[tokens, place, None])
        return self.head(self.norm(x + mixed.view_as(x)))


@member(token_ids, 6, 9)
class DenseExperts(nn.Module):
    """A mixture of experts in which every token goes to all, by weights of three dimensions."""

    def __init__(self):
        super().__init__()
        self.embed, self.gate = nn.Embedding(50, 16), nn.Linear(16, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, *size) / 4) for size in ((16, 32), (32, 16)))
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        flat = x.reshape(-1, x.shape[-1])
        each = torch.bmm(F.relu(torch.bmm(flat.expand(4, -1, -1), self.up)), self.down)  # (experts, tokens, width)
        mixed = torch.einsum("etw,te->tw", each, self.gate(flat).softmax(-1))
        return self.head(x + mixed.view_as(x))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), Block(8)) for _ in range(2))

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        for stage in self.stages:
            x = stage(x)
        return x


@member(size=16, other=24)
class Features(nn.Module):
    """Wraps a backbone and returns what its stages give, from a list of what it looks at, ``stage_hooks``."""

    def __init__(self):
        super().__init__()
        self.body = Backbone()
        self.stage_hooks = {"0": "stride8", "1": "stride16"}

    def forward(self, x):
        found = {}
        x = F.relu(self.body.norm(self.body.stem(x)))
        for name, stage in self.body.stages.named_children():
            x = stage(x)
            if name in self.stage_hooks:
                found[self.stage_hooks[name]] = x
        return found


def noise(batch, size):
    return (torch.randn(batch, 8, size, size),)


@member(noise, 2, 3)
class Generator(nn.Module):
    """Grows an image out of noise, by transposed convolutions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 8, 3, 2, 1, output_padding=1, groups=2),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.layers(x)
