"""Random nets: every operator argument is honoured in the file, in both runtimes, from the example to the proof."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright as bw
from tests.zoo.random_nets import random_net

RUNTIMES = ["onnxruntime", "openvino"]
QUICK = (2001, 2002)


def prove(net: nn.Module, x: Tensor, runtime: str, path: Path) -> None:
    pytest.importorskip(runtime)
    data = [x, 0.7 * x]
    model = bw.calibrate(bw.prepare(net.eval(), x, backend=runtime), data)
    proof = bw.verify(model, bw.export(model, path), data, runtimes=[runtime], latency=False)
    assert proof.ok, (net, proof.missed)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("seed", QUICK)
def test_a_random_net_is_proven(seed: int, runtime: str, tmp_path: Path) -> None:
    net, x = random_net(seed)
    prove(net, x, runtime, tmp_path / "net.onnx")


def test_the_same_seed_gives_the_same_net() -> None:
    (first, x), (second, y) = random_net(7), random_net(7)
    assert repr(first) == repr(second)
    assert torch.equal(x, y)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


class Joined(nn.Module):
    """Has a padding mode but no padding after a concatenation: OpenVINO crashed at the second of two quantizers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(11, 2, (1, 3), padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        return self.last(torch.cat([b, a, b], 1))


class Then(nn.Module):
    def __init__(self, then: str) -> None:
        super().__init__()
        self.pool, self.conv, self.then = nn.AvgPool2d(2), nn.Conv2d(1, 2, 3), then

    def forward(self, x: Tensor) -> Tensor:
        if self.then == "average":
            return self.pool(x) * 2.0 + 3.0
        if self.then == "padded":
            return F.pad(self.pool(x), (0, 1), value=1.0)
        if self.then == "split":
            return self.conv(torch.split(x, 4, 2)[0][:, :1])
        return self.conv(x.amax(1, keepdim=True) if self.then == "amax" else x.min(1, keepdim=True)[0])


def test_a_padding_mode_without_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(Joined(), torch.randn(2, 3, 8, 8), "openvino", tmp_path / "net.onnx")


@pytest.mark.parametrize("then", ["average", "padded", "split", "amax", "min"])
def test_what_openvino_rounds_clips_or_refuses(then: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(Then(then), torch.randn(2, 4, 8, 8), "openvino", tmp_path / "net.onnx")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_three_dimensions_without_a_bias(runtime: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(3, 4, 3, (1, 2, 1), 1, (1, 1, 2), bias=False), nn.ReLU())
    prove(net, torch.randn(2, 3, 6, 6, 6), runtime, tmp_path / "net.onnx")
