"""Nets to save, with what makes saving hard, and how two models are compared."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.graph import Inputs
from bitwright.quantizer import quantizers

IMAGES = torch.linspace(-2, 2, 4 * 3 * 8 * 8).sin().reshape(4, 3, 8, 8)
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


class Small(nn.Module):
    """Convolutions with BatchNorms, constants of every kind, and tied weights."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.fc, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.fc.weight
        self.gamma = nn.Parameter(torch.rand(8))
        self.attribute = torch.rand(8)
        self.register_buffer("hidden", torch.rand(8), persistent=False)

    def forward(self, x):
        y = F.relu(self.norm(self.first(x)))
        y = y + F.relu(self.norm2(self.depthwise(y)))
        y = y.mean((2, 3)) * self.gamma + self.attribute + self.hidden * torch.ones(8)
        return self.tied(F.relu(self.fc(y)))


class Tokens(nn.Module):
    """Has a lookup table, and a part that runs as written."""

    def __init__(self):
        super().__init__()
        self.table, self.island, self.head = nn.Embedding(10, 8), Looks(), nn.Linear(8, 4)

    def forward(self, tokens, double=False):
        x = self.island(self.table(tokens))
        return self.head(x * 2 if double else x)


class Looks(nn.Module):
    """Looks at its data, so it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) if float(x.sum()) > -1e9 else x


def calibrated(build=Small, inputs=IMAGES, **options):
    model = bw.prepare(build(), inputs, **options)
    return bw.calibrate(model, [inputs])


def outputs(model, inputs):
    call = Inputs.of(copy.deepcopy(inputs))
    with torch.no_grad():
        return model(*call.args, **call.kwargs)


def training_step(model, inputs):
    """The loss and all gradients."""
    torch.manual_seed(5)
    call = Inputs.of(copy.deepcopy(inputs))
    model.train().zero_grad()
    loss = model(*call.args, **call.kwargs).pow(2).mean()
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def assert_equal(one, other, inputs):
    """Two models compute the same in evaluation and in training, to the bit, and have the same quantizers."""
    assert {n: repr(q) for n, q in quantizers(one).items()} == {n: repr(q) for n, q in quantizers(other).items()}
    modes = [[(n, m.training) for n, m in model.named_modules()] for model in (one, other)]
    assert modes[0] == modes[1]
    assert torch.equal(outputs(one, inputs), outputs(other, inputs))
    steps = [training_step(model, inputs) for model in (one, other)]
    assert list(steps[0]) == list(steps[1])
    assert all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])
