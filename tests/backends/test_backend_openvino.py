"""What OpenVINO gets wrong in integers, and how its backend keeps files from meeting it."""

import os

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.cpu import has_vnni
from bitwright.preparation import Verdict


class Between(nn.Module):
    """Something between two layers, whose values may be negative, so that there is a zero point."""

    def __init__(self, function, rank=2):
        super().__init__()
        conv = nn.Conv1d if rank == 1 else nn.Conv2d
        self.first, self.second, self.function = conv(3, 4, 1), conv(4, 4, 1), function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def carried_file(net, x, tmp_path):
    """The ledger of a prepared net, and how far its file is from the simulation, in parts of the largest value."""
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = bw.prepare(net.eval(), x, "openvino")
    bw.calibrate(model, [x], progress=False)
    file = bw.export(model, tmp_path / "net.onnx")
    with torch.no_grad():
        expected = model(x)
    got = torch.as_tensor(bw.run_file(file, "openvino")(x))
    gap = float((got - expected).abs().max() / expected.abs().max())
    return {e.operator: e for e in bw.ledger_of(model).entries}, gap


ALONE = "OpenVINO pads in float along a single dimension"
PADS = {
    "one dimension": (lambda x: F.pad(x, (1, 1)), 2, ALONE),
    "by keyword": (lambda x: F.pad(input=x, pad=(1, 1)), 2, ALONE),
    "the other dimension": (lambda x: F.pad(x, (0, 0, 2, 0)), 2, ALONE),
    "sequences": (lambda x: F.pad(x, (2, 1)), 1, ALONE),
    "a module": (nn.ZeroPad2d((-1, 1, 0, 0)), 2, ALONE),
    "channels": (lambda x: F.pad(x[:, 1:], (0, 0, 0, 0, 1, 0)), 2, ALONE),
    "two dimensions": (lambda x: F.pad(x, (0, 1, 0, 1)), 2, ""),
    "reflection": (nn.ReflectionPad2d((1, 1, 0, 0)), 2, ""),
    "minus infinity": (
        lambda x: F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=float("-inf")), 3, 2),
        2,
        "OpenVINO pads in float with values that are not finite",
    ),
}


@pytest.mark.parametrize("name", PADS)
def test_padding_a_tensor_with_a_zero_point(name, tmp_path):
    function, rank, reason = PADS[name]
    ledger, gap = carried_file(Between(function, rank), torch.randn(2, 3, *[5] * rank), tmp_path)
    assert gap < 0.02
    assert (ledger["pad"].verdict, ledger["pad"].reason) == (Verdict.CARRIED, reason)


@pytest.mark.parametrize(
    ("join", "verdict"),
    [
        (lambda x: torch.cat([x, x.tanh()], 1)[:, 2:6], Verdict.INTEGER),
        (lambda x: torch.cat([x, x.tanh()], axis=1)[:, 2:6], Verdict.INTEGER),
        (lambda x: torch.cat([x, x.tanh()], dim=-3)[:, 2:6], Verdict.INTEGER),
        (lambda x: torch.cat([x, x.tanh()], axis=2), Verdict.FLOAT),
        (lambda x: torch.cat([x, x.tanh()]), Verdict.FLOAT),
    ],
)
def test_joining_along_channels_only(join, verdict, tmp_path):
    ledger, gap = carried_file(Between(join), torch.randn(2, 3, 5, 5), tmp_path)
    assert gap < 0.02
    assert ledger["cat"].verdict is verdict


class CountedGroups(nn.Module):
    """Depthwise convolutions that count their groups or padding, as state-space models do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1, 3))

    def forward(self, x):
        x = F.conv1d(x, self.weight, padding=1, groups=x.shape[1])
        return F.conv1d(x, self.weight, padding=x.shape[2] // 6, groups=4)


def test_settings_that_are_computed():
    net, x = CountedGroups().eval(), torch.randn(2, 4, 6)
    model = bw.prepare(net, x, "openvino")
    assert torch.equal(model(x), net(x))
    groups, padding = [e for e in bw.ledger_of(model).entries if e.operator == "conv1d"]
    assert groups.verdict is Verdict.INTEGER
    assert padding.verdict is Verdict.FLOAT
    assert "its padding is computed" in padding.reason


class Queries(nn.Module):
    """A table split into positions and contents that several layers read, as in detectors."""

    def __init__(self, width=8):
        super().__init__()
        self.width, self.table, self.image = width, nn.Embedding(10, 2 * width), nn.Conv2d(3, 8, 3)
        self.places, self.both, self.contents = nn.Linear(width, 2), nn.Linear(width, 8), nn.Linear(width, 8)

    def forward(self, x):
        image = self.image(x)
        parts = torch.split(self.table.weight, self.width, dim=1)
        positions, contents = (part.unsqueeze(0).expand(image.shape[0], -1, -1) for part in parts)
        found = self.both(contents + positions) + self.contents(contents)
        return image, self.places(positions).sigmoid(), found


def test_layers_of_constants_compute_in_float(tmp_path):
    torch.manual_seed(0)
    net, x = Queries().eval(), torch.randn(2, 3, 16, 16)
    model = bw.calibrate(bw.prepare(net, x, "openvino"), [x], progress=False)
    found = {e.name: (e.verdict.value, e.reason) for e in bw.ledger_of(model).entries}
    assert found["places"] == found["both"] == ("float", "OpenVINO computes layers of constants in float")
    assert found["image"][0] == "integer"
    proof = bw.verify(model, bw.export(model, tmp_path / "net.onnx"), [x], latency=False, progress=False)
    assert proof.ok, proof.missed


class Residual(nn.Module):
    """Sums around layers, and what reads the last of them."""

    def __init__(self, layer, after):
        super().__init__()
        self.one, self.two, self.after = layer(8, 8, 1) if layer is nn.Conv2d else layer(8, 8), nn.ReLU(), after

    def forward(self, x):
        x = x + self.one(x)
        return self.after(self.two(x + self.one(x)))


@pytest.mark.parametrize(
    ("layer", "after", "integer"),
    [
        (nn.Linear, nn.LayerNorm(8), False),
        (nn.Linear, nn.Linear(8, 3), True),
        (nn.Conv2d, nn.Softmax(1), True),  # other readers of a convolution may read integers
    ],
)
def test_sums_are_quantized_for_what_computes_in_integers(layer, after, integer, tmp_path):
    x = torch.randn(2, 8, 4, 4) if layer is nn.Conv2d else torch.randn(2, 5, 8)
    ledger, gap = carried_file(Residual(layer, after), x, tmp_path)
    assert gap < 0.02
    assert ledger["add"].verdict is (Verdict.INTEGER if integer else Verdict.FLOAT)
    assert integer or ledger["add"].reason == "nothing around it computes in integers"


class Attending(nn.Module):
    """Attention with a mask that hides all keys from a query, and a product of a tensor with itself."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x, seen):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, seen).transpose(1, 2).flatten(2)
        causal = F.scaled_dot_product_attention(value, query, key, is_causal=True)
        return self.out(mixed), x @ x.transpose(1, 2), causal


@pytest.mark.skipif(not has_vnni() or "ONEDNN_MAX_CPU_ISA" in os.environ, reason="overflows without VNNI")
def test_attention_in_integers_where_weights_have_8_bits(tmp_path):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    net, x, seen = Attending().eval(), torch.randn(3, 7, 16), torch.rand(7, 7) > 0.4
    seen[2] = False
    model = bw.calibrate(bw.prepare(net, (x, seen), "openvino", weight="auto:vnni"), [(x, seen)], progress=False)
    file = bw.export(model, tmp_path / "net.onnx")
    proof = bw.verify(model, file, [(x, seen), (x[:2] / 3, ~seen)], latency=False, progress=False)
    assert proof.ok, proof.missed
    done, run = proof.runtimes["openvino"].count("matmul")
    assert done == run == 3  # the two products of an attention are one operator


def test_narrow_quantizers_are_not_repeated(tmp_path):
    """A Clip before them hid them: OpenVINO rounded again, and the result was 0.15 % off."""
    pytest.importorskip("openvino")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardswish(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))
    x, counts = torch.randn(2, 3, 8, 8), []
    for spec in ("int8 symmetric tensor", "int8 symmetric narrow tensor"):
        model = bw.calibrate(bw.prepare(net.eval(), x, "openvino", activation=spec), [x], progress=False)
        nodes = onnx.load(bw.export(model, tmp_path / "net.onnx").path).graph.node
        counts.append(sum(node.op_type == "QuantizeLinear" for node in nodes))
    assert counts[0] == counts[1]
