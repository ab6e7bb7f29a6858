"""Norms that a model writes out as x * weight: `smooth` moves factors out of them."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.correction.links import find_links
from bitwright.correction.outcome import Correction
from bitwright.correction.reference import Original
from bitwright.correction.running import outputs_apart

WIDTH = 16


class HandMade(nn.Module):
    """A norm by hand, on the left or on the right of its weight, with or without a bias."""

    def __init__(self, bias: bool, left: bool) -> None:
        super().__init__()
        self.weight, self.left = nn.Parameter(torch.rand(WIDTH) + 0.5), left
        self.bias = nn.Parameter(torch.randn(WIDTH)) if bias else None

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = self.weight * y if self.left else y * self.weight
        return y if self.bias is None else y + self.bias


class Gated(nn.Module):
    """What a gated block of a language model computes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.gate = norm, nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))


def gated(bias, left):
    torch.manual_seed(0)
    net = Gated(HandMade(bias, left)).eval()
    with torch.no_grad():
        net.norm.weight[[3, 9]] *= 80.0  # outlier channels
        for layer in (net.up, net.gate):
            layer.weight[:, [3, 9]] /= 80.0
    return net, [torch.randn(16, 6, WIDTH) for _ in range(2)]


@pytest.mark.parametrize("recipe", ["W8A8", {"preset": "W8A8", "backend": "academic"}], ids=["integers", "float norms"])
@pytest.mark.parametrize(("bias", "left"), [(False, True), (True, False)], ids=["weight * x", "x * weight + bias"])
def test_outliers_leave_a_norm_written_out(bias, left, recipe):
    net, batches = gated(bias, left)
    model = bw.calibrate(bw.prepare(net, batches[0], recipe=recipe), batches)
    before = outputs_apart(model, Original(model), batches)
    done = bw.smooth(model, batches)
    assert "norm.weight to gate, up" in done.changed
    assert outputs_apart(model, Original(model), batches) < 0.5 * before
    with torch.no_grad():
        wanted, found = net(batches[0]), Original(model).run(model, bw.ledger_of(model).example)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max())
    factor = net.norm.weight / model.norm.weight
    assert torch.allclose(model.up.weight, net.up.weight * factor, rtol=1e-4)
    if bias:
        assert torch.allclose(model.norm.bias, net.norm.bias / factor, rtol=1e-4)


class Shared(nn.Module):
    """A weight that multiplies two tensors, and one that comes before a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.scale = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.two(torch.relu(self.one(x * self.both)) * self.both)
        return x + y * self.scale


def test_products_that_are_not_norms_take_no_factor():
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = bw.calibrate(bw.prepare(Shared().eval(), x, recipe={"preset": "W8A8", "backend": "academic"}), [x])
    done = Correction("smooth")
    assert not [link for link in find_links(model, done) if "both" in link.name or "scale" in link.name]
    assert done.skipped["both"] == "a parameter is read by something else"
    assert "reads its result" in done.skipped["scale"]
