"""Nearest interpolation takes torch's positions in files, whatever the sizes."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw

WISHES = [
    {"size": (8, 16)},
    {"size": (8, 16), "mode": "nearest-exact"},
    {"size": (3, 8)},
    {"scale_factor": (1.5, 0.375)},
    {"scale_factor": (2.25, 1.5), "mode": "nearest-exact"},
    {"scale_factor": (2, 3)},
    {"size": (6, 28), "mode": "nearest-exact"},
]


class Resized(nn.Module):
    """One convolution, resized in many ways."""

    def __init__(self, wishes):
        super().__init__()
        self.conv, self.wishes = nn.Conv2d(2, 3, 1), wishes

    def forward(self, x):
        x = self.conv(x)
        return tuple(F.interpolate(x, **wish) for wish in self.wishes)


def exported(wishes, runtime, path, **options):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 6, 14)
    model = bw.prepare(Resized(wishes).eval(), (x,), runtime)
    bw.calibrate(model, [x])
    return model, x, bw.export(model, path, **options)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_positions_are_torchs(tmp_path, runtime, free):
    model, x, file = exported(WISHES, runtime, tmp_path / "nearest.onnx", dynamic_shapes=free)
    data = [x, torch.randn(1, 2, 90, 21)] if free else [x]
    proof = bw.verify(model, file, data, runtimes=[runtime], latency=False)
    assert proof.ok, proof.missed


def test_other_factors_need_fixed_sizes(tmp_path):
    wishes = [{"scale_factor": (1.3, 1 / 7)}, {"scale_factor": 2.3, "mode": "nearest-exact"}]
    model, x, file = exported(wishes, "onnxruntime", tmp_path / "fixed.onnx")
    sizes = onnx.load(file).graph.input[0].type.tensor_type.shape.dim
    assert [size.dim_value for size in sizes] == [0, 2, 6, 14]  # only the batch size is free
    proof = bw.verify(model, file, [x, x[:1]], runtimes=["onnxruntime"], latency=False)
    assert proof.ok, proof.missed


@pytest.mark.parametrize("free", [False, True])
def test_whole_factors_are_resized(tmp_path, free):
    _, _, file = exported([{"scale_factor": 2}], "onnxruntime", tmp_path / "twice.onnx", dynamic_shapes=free)
    kinds = {node.op_type for node in onnx.load(file).graph.node}
    assert "Resize" in kinds
    assert "Gather" not in kinds


def test_the_new_size_of_another_tensor(tmp_path):
    class Like(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return F.interpolate(self.up(self.down(x)), size=x.shape[2:]) + x

    x = torch.randn(2, 2, 8, 14)
    model = bw.prepare(Like().eval(), (x,), "onnxruntime")
    bw.calibrate(model, [x])
    file = bw.export(model, tmp_path / "like.onnx")
    proof = bw.verify(model, file, [x, torch.randn(1, 2, 7, 13)], runtimes=["onnxruntime"], latency=False)
    assert proof.ok, proof.missed
