"""Means over images become pools that runtimes have integer kernels for."""

import pytest
import torch
from torch import nn

import bitwright as bw


class Head(nn.Module):
    """A convolution whose result is averaged in one of many ways."""

    def __init__(self, average, volume=False):
        super().__init__()
        self.conv = (nn.Conv3d if volume else nn.Conv2d)(2, 4, 3, padding=1)
        self.average = average

    def forward(self, x):
        return self.average(self.conv(x)) * 2.0


AVERAGES = {
    "positive": lambda x: x.mean((2, 3)),
    "negative": lambda x: x.mean(dim=[-1, -2]),
    "kept": lambda x: torch.mean(x, (2, 3), keepdim=True),
    "kept by position": lambda x: torch.mean(x, (-2, -1), True),
}
OTHERS = {
    "one axis": lambda x: x.mean((2,)),
    "channels": lambda x: x.mean((1, 2, 3)),
    "tokens": lambda x: x.flatten(2).mean((-1,)),
    "all": lambda x: x.mean(),
    "double": lambda x: x.mean((2, 3), dtype=torch.float64),
    "normalized": lambda x: x - x.mean((2, 3), keepdim=True),
}


def operators(model):
    return [entry.operator for entry in bw.ledger_of(model).entries]


def prepared(average, backend="onnxruntime", volume=False):
    torch.manual_seed(0)
    net, x = Head(average, volume).eval(), torch.randn(2, 2, *[5] * (3 if volume else 2))
    return net, bw.prepare(net, (x,), backend), x


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt"])
@pytest.mark.parametrize("name", AVERAGES)
def test_a_mean_over_all_places_is_a_pool(name, backend):
    net, model, x = prepared(AVERAGES[name], backend)
    assert "adaptive_avg_pool2d" in operators(model)
    assert "mean" not in operators(model)
    for value in (x, torch.randn(3, 2, 7, 6)):
        assert torch.equal(model(value), net(value))


def test_a_mean_over_a_volume():
    net, model, x = prepared(lambda x: x.mean((2, 3, 4)), volume=True)
    assert "adaptive_avg_pool3d" in operators(model)
    assert torch.equal(model(x), net(x))


@pytest.mark.parametrize("name", OTHERS)
def test_other_means_stay(name):
    net, model, x = prepared(OTHERS[name])
    assert "adaptive_avg_pool2d" not in operators(model)
    assert torch.equal(model(x), net(x))


def test_a_target_that_has_the_mean_keeps_it():
    _, model, _ = prepared(AVERAGES["kept"], "virtual")
    assert "mean" in operators(model)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_file_averages_in_integers(tmp_path, runtime):
    _, model, x = prepared(AVERAGES["positive"], runtime)
    bw.calibrate(model, [x])
    proof = bw.verify(model, bw.export(model, tmp_path / "mean.onnx"), [x], runtimes=[runtime], latency=False)
    assert proof.ok, proof.missed
    assert next(o for o in proof.runtimes[runtime].operators if o.kind == "adaptive_avg_pool2d").integer
