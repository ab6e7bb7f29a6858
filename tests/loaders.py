"""Calibrate with a DataLoader whose workers are forked or spawned: ``python -m tests.loaders fork``."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import bitwright as bw
from bitwright.quantizer import quantizers


class Images(Dataset):
    """Images that are computed by a prepared model, in whatever process asks for them."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = bw.prepare(nn.Conv2d(3, 3, 1).eval(), torch.ones(1, 3, 4, 4))

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(torch.linspace(-index, 1, 48).reshape(1, 3, 4, 4))[0]


def ranges(loader):
    layer = nn.Conv2d(3, 4, 3).eval()
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 108).reshape(4, 3, 3, 3))
        layer.bias.zero_()
    model = bw.calibrate(bw.prepare(layer, torch.ones(1, 3, 4, 4)), loader)
    return [q.qparams()[0].tolist() for q in quantizers(model).values()]


class Plain(Images):
    """Images that need no model, which not every way of starting a process can send."""

    def __init__(self):
        self.model = nn.Identity()


if __name__ == "__main__":
    data = {"fork": Images, "spawn": Plain}[sys.argv[1]]()
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=sys.argv[1])
    print("equal" if ranges(loader) == ranges(DataLoader(data, batch_size=2)) else "different")
