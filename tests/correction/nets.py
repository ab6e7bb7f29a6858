"""Small nets and data for the correctors."""

import copy

import torch
from torch import Tensor, nn

import bitwright as bw


class Net(nn.Module):
    """Convolutions with BatchNorms (plain, grouped, depthwise), a norm of its own after a sum, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.wide = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.BatchNorm2d(8), nn.ReLU())
        self.side = nn.Conv2d(8, 8, 3, stride=2, dilation=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.stem(x))
        x = self.norm(self.wide(x) + self.side(x))
        return self.fc(x.mean((2, 3)))


def data(count: int = 2, size: int = 32) -> list[Tensor]:
    """Batches of images."""
    source = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 10, 10, generator=source) + 0.3 for _ in range(count)]


def trained(net: nn.Module | None = None) -> nn.Module:
    """A net whose BatchNorms know its data."""
    torch.manual_seed(0)
    net = Net() if net is None else net
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            module.momentum = None
    with torch.no_grad():
        for x in data(3):
            net.train()(x)
    return net.eval()


def calibrated(net: nn.Module, bits: int = 3, batches: list[Tensor] | None = None, **recipe: object) -> nn.Module:
    """The net with weights of this many bits."""
    batches = batches or data()
    given = {"backend": "virtual", "weight": f"int{bits} symmetric narrow channel:0", "activation": "uint8", **recipe}
    qmodel = bw.prepare(copy.deepcopy(net), batches[0], recipe=given)
    return bw.calibrate(qmodel, batches)
