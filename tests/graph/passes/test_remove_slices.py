"""Slices that take everything go; any other stays."""

import pytest
import torch
from torch import nn

import bitwright as bw


class Sliced(nn.Module):
    def __init__(self, cut) -> None:
        super().__init__()
        self.conv, self.cheap = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.wide = nn.Conv2d(4, 8, 1)
        self.cut = cut

    def forward(self, x):
        y = self.conv(x)
        return self.cut(torch.cat([y, self.cheap(y)], 1)) + self.cut(self.wide(x))


CUTS = {
    "all channels": (lambda y: y[:, :8], True),
    "more than all": (lambda y: y[:, :99, :, :], True),
    "everything": (lambda y: y[:], True),
    "some": (lambda y: y[:, :6], False),
    "from the second": (lambda y: y[:, 1:8], False),
    "with steps": (lambda y: y[:, :8:2], False),
}


@pytest.mark.parametrize("name", CUTS)
def test_only_slices_that_take_all_go(name):
    cut, goes = CUTS[name]
    x = torch.randn(2, 4, 6, 6)
    net = Sliced(cut).eval()
    model = bw.prepare(net, x)
    assert torch.equal(model(x), net(x))
    kinds = [e.operator for e in bw.ledger_of(model).entries]
    assert kinds.count("getitem") == (0 if goes else 2)


def test_a_slice_of_the_batch_stays():
    class First(nn.Module):
        def forward(self, x):
            return torch.relu(x[:4]) * 2

    model = bw.prepare(First(), torch.randn(4, 3))
    assert model(torch.randn(6, 3)).shape == (4, 3)


def test_openvino_runs_a_ghost_block(tmp_path):
    x = torch.randn(2, 4, 6, 6)
    net = nn.Sequential(Sliced(CUTS["all channels"][0]), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    model = bw.calibrate(bw.prepare(net, x, "openvino"), [x])
    proof = bw.verify(model, bw.export(model, tmp_path / "m.onnx"), [x], runtimes=["openvino"], latency=False)
    assert not [line for line in proof.missed if "crashed" in line]
    assert proof.ok
