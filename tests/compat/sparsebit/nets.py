"""A model, a config, and what the tests of Sparsebit's names share."""

import torch.nn.functional as F
from torch import nn

from bitwright.compat.sparsebit import QuantModel, parse_qconfig
from bitwright.preparation import ledger_of
from bitwright.quantizer import quantizers

YAML = """
BACKEND: virtual
SCHEDULE:
  FUSE_BN: True
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER:
    TYPE: uniform
    BIT: 8
  OBSERVER:
    TYPE: MINMAX
A:
  QSCHEME: per-tensor-affine
  QUANTIZER:
    TYPE: uniform
    BIT: 8
  OBSERVER:
    TYPE: MINMAX
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return F.relu(self.norm1(self.conv(x))) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.blocks(self.first(x)).mean((2, 3)))


def config(**changes):
    made = parse_qconfig(YAML)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = made
        for part in parents:
            place = place[part]
        place[last] = value
    return made


def made(model, x, **changes):
    return QuantModel(model, config(**changes), example_inputs=x).model


def verdicts(model):
    return {e.name: e.verdict.value for e in ledger_of(model).entries}


def first_input(model):
    return quantizers(model)["bitwright.quantizers.x"]
