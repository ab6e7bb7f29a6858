"""Layers that stay float: no runtime quantizes them unasked, and no guard stands where none is needed."""

import onnx
import pytest
import torch
from torch import nn

import bitwright as bw


def _file(skip, tmp_path, backend="onnxruntime", norm=True):
    torch.manual_seed(0)
    middle = [nn.Conv2d(8, 8, 3, padding=1), *([nn.BatchNorm2d(8)] if norm else []), nn.ReLU()]
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Sequential(*middle), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))
    x = torch.randn(2, 3, 8, 8)
    model = bw.calibrate(bw.prepare(net.eval(), x, backend, skip=skip), [x])
    return model, bw.export(model, tmp_path / "file.onnx"), x


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_float_layer_between_quantized_tensors_stays_float(backend, norm, tmp_path):
    model, file, x = _file(["2.0"], tmp_path, backend, norm)
    proof = bw.verify(model, file, [x], runtimes=[backend], latency=False)
    integer = [name for o in proof.runtimes[backend].operators if o.integer for name in o.name.split(", ")]
    assert proof.ok
    assert {"0", "4"} <= set(integer)
    assert not {"2.0", "2.1"} & set(integer)


def test_float_layers_side_by_side_have_no_guards(tmp_path):
    _, file, _ = _file(["0", "2.0"], tmp_path)
    assert "Max" not in {node.op_type for node in onnx.load(str(file.path)).graph.node}
    _, file, _ = _file(["2.0"], tmp_path)
    nodes = [node.op_type for node in onnx.load(str(file.path)).graph.node]
    assert nodes.count("Max") == 1
