"""Nets and views of prepared models for the tests of preparation."""

import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw


class Probe(nn.Module):
    """A bit of everything: stem, pool, residual block, concatenation, upsampling, gate, head."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.branch, self.scaled = nn.Conv2d(8, 4, 1), nn.Conv2d(12, 8, 1)
        self.up, self.bn3 = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.BatchNorm2d(8)
        self.gate, self.avg, self.fc = nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(self.relu(self.bn(self.stem(x))))
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        out = self.relu(out)
        out = torch.cat([out, self.branch(x)], 1)
        out = self.scaled(out) * 2.0
        out = F.interpolate(self.relu(self.bn3(self.up(out))), scale_factor=2)
        out = out * torch.sigmoid(self.gate(out))
        return self.fc(torch.flatten(self.avg(out), 1))


def image(batch=2):
    return torch.randn(batch, 3, 16, 16)


def placed(model):
    """Which tensors are quantized, by which quantizer, for whom."""
    found = []
    for node in model.graph.nodes:
        if node.op == "call_module" and isinstance(model.get_submodule(node.target), bw.TensorQuantizer):
            name = node.target.removeprefix("bitwright.quantizers.")
            found.append((node.args[0].name, name, sorted(u.name for u in node.users)))
    return found


def verdicts(model):
    return {e.name: e.verdict for e in bw.ledger_of(model).entries}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.other = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.block(x)
        return self.fc((self.other(x) + x).mean((2, 3), dtype=torch.float32))


def specs(model):
    return {e.name: (e.weight, e.input, e.output) for e in bw.ledger_of(model).entries}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.conv(torch.tanh(self.conv(x)))
