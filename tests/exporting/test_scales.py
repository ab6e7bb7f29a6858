"""OpenVINO passes on scales itself: its files repeat no quantizers, and norms take in zero points."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification import RUNTIMES

pytest.importorskip("openvino")


class Between(nn.Module):
    """Two layers with zero points, whose results, joined or not, a third reads through ``between``."""

    def __init__(self, between, joined):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1, bias=False)
        self.between, self.joined, self.three = between, joined, nn.LazyConv2d(4, 1)

    def forward(self, x):
        one = self.one(x)
        two = self.two(one)
        return self.three(self.between(torch.cat((one, two), 1) if self.joined else two))


def written(net, tmp_path, backend="openvino"):
    """The model, its file, and a proof of it."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 10)
    net(x)
    model = bw.calibrate(bw.prepare(net.eval(), x, backend), [torch.randn(8, 3, 10, 10)], progress=False)
    file = bw.export(model, tmp_path / "net.onnx")
    return file, bw.verify(model, file, [torch.randn(3, 3, 10, 10)], runtimes=[backend], latency=False)


def executed(file, role="compute"):
    """What OpenVINO runs, in order, with its precision."""
    loaded = OnnxFile.read(file.path)
    found = RUNTIMES.get("openvino")().executed(loaded, {loaded.inputs[0]: torch.randn(2, 3, 10, 10).numpy()})
    return [operator.runs_as for operator in found if operator.role == role]


def quantizers(file):
    return [node for node in onnx.load(file.path).graph.node if node.op_type == "QuantizeLinear"]


MOVES = {
    "nothing": nn.Identity(),
    "a pool": nn.MaxPool2d(2),
    "a module of each kind": nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)),
    "a transposition": lambda x: x.transpose(2, 3),
    "a selection": lambda x: x[:, 2:10],
    "shuffled pixels": nn.PixelShuffle(2),
    "upsampling": nn.Upsample(scale_factor=2),
    "several": lambda x: F.max_pool2d(x.flip(3), 3, 2).permute(0, 1, 3, 2),
}


@pytest.mark.parametrize("move", MOVES)
def test_what_moves_values_has_no_quantizer_after_it(move, tmp_path):
    file, proof = written(Between(MOVES[move], joined=False), tmp_path)
    assert proof.ok, proof
    assert len(quantizers(file)) == 3  # the input and both layers
    assert "Convert u8" not in executed(file, "conversion")
    assert not any(kind.startswith("Convolution f") for kind in executed(file))


@pytest.mark.parametrize("move", MOVES)
def test_joined_tensors_have_quantizers_only_before_what_changes_channels(move, tmp_path):
    file, proof = written(Between(MOVES[move], joined=True), tmp_path)
    assert proof.ok, proof
    same = move in ("nothing", "a pool", "upsampling", "a module of each kind")
    assert (len(quantizers(file)) == 3) == same
    assert any("in the same steps" in tensor.reason for tensor in file.tensors) == (same or move == "shuffled pixels")
    assert not any(kind.startswith("Convolution f") for kind in executed(file))


@pytest.mark.parametrize("kept", [lambda x: x.repeat(1, 2, 1, 1), nn.ZeroPad2d(1), nn.ZeroPad2d((0, 1, 2, 5))])
def test_a_quantizer_stays_where_openvino_loses_the_scale(kept, tmp_path):
    file, proof = written(Between(kept, joined=False), tmp_path)
    assert proof.ok, proof
    assert len(quantizers(file)) == 4
    assert not any(kind.startswith("Convolution f") for kind in executed(file))


def test_onnxruntime_has_a_quantizer_at_every_integer_input(tmp_path):
    file, proof = written(Between(nn.MaxPool2d(2), joined=True), tmp_path, "onnxruntime")
    assert proof.ok, proof
    assert len(quantizers(file)) == 6  # also of the joined tensor, the pooled one, and the result


class PreActivated(nn.Module):
    """A norm that reads joined tensors, as in DenseNet, one of them pooled."""

    def __init__(self, *, negative, shared):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1, bias=False)
        self.norm, self.three = nn.BatchNorm2d(16, eps=1e-3), nn.Conv2d(16, 4, 1)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        nn.init.normal_(self.norm.bias)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        self.shared = shared
        if negative:
            self.norm.weight.data[::3] *= -1

    def forward(self, x):
        one = self.one(x)
        pooled = F.max_pool2d(one, 2)
        two = self.two(pooled if self.shared else one[..., ::2, ::2])
        return self.three(self.norm(torch.cat((pooled, two), 1)).relu())


@pytest.mark.parametrize(("negative", "shared"), [(False, False), (True, False), (False, True)])
def test_a_norm_of_joined_tensors(negative, shared, tmp_path):
    torch.manual_seed(0)
    file, proof = written(PreActivated(negative=negative, shared=shared).eval(), tmp_path)
    assert proof.ok, proof
    assert proof.runtimes["openvino"].largest <= 1
    inside = "FakeQuantize u8" in executed(file, "conversion")  # the quantizer reads integers, with the norm in it
    assert inside == (not negative and not shared)
    graph = onnx.load(file.path).graph
    makers = {output: node for node in graph.node for output in node.output}
    norm = next(node for node in graph.node if node.op_type == "BatchNormalization")
    assert (makers[norm.input[0]].op_type == "Max") == negative  # a guard
    plain = [node for node in graph.node if node.op_type == "DequantizeLinear" and len(node.input) == 2]
    assert len([node for node in plain if "bias" not in node.output[0]]) == 2 * inside  # without zero points


def test_an_average_of_a_linear_layer_without_bias_keeps_its_scales(tmp_path):
    """OpenVINO made the layer's scales those of the quantizer after it: 207 steps off."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.mix(x.transpose(0, 1)).transpose(0, 1).mean(1))

    torch.manual_seed(0)
    x = torch.randn(2, 6, 16)
    model = bw.calibrate(bw.prepare(Pooled().eval(), x, "openvino"), [x])
    assert bw.verify(model, bw.export(model, tmp_path / "pooled.onnx"), [x], runtimes="openvino", latency=False).ok
