"""Where quantizers sit, and who shares them."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.nn.mixins import PlacedQuantizer
from bitwright.preparation import Verdict
from bitwright.quantizer import quantizers
from tests.preparation.nets import Probe, Small, Twice, image, placed, specs, verdicts

PLACEMENT = {
    "onnxruntime": [
        ("x", "x", ["stem"]),
        ("relu", "relu", ["pool"]),
        ("relu_1", "relu_1", ["conv2"]),
        ("conv2", "conv2", ["add"]),
        ("relu_2", "relu_2", ["cat"]),
        ("branch", "branch", ["cat"]),
        ("cat", "cat", ["scaled"]),
        ("scaled", "scaled", ["up"]),
        ("relu_3", "relu_3", ["interpolate"]),
        ("gate", "gate", ["sigmoid"]),
        ("sigmoid", "sigmoid", ["mul_1"]),
        ("mul_1", "mul_1", ["avg"]),
        ("avg", "avg", ["flatten"]),
    ],
    "openvino": [
        ("x", "x", ["stem"]),
        ("relu", "relu", ["pool"]),
        ("relu_1", "relu_1", ["conv2"]),
        ("conv2", "conv2", ["add"]),
        ("relu_2", "relu_2", ["cat"]),
        ("branch", "relu_2", ["cat"]),
        ("cat", "cat", ["scaled"]),
        ("scaled", "scaled", ["up"]),
        ("relu_3", "relu_3", ["interpolate"]),
        ("mul_1", "mul_1", ["avg"]),
        ("avg", "avg", ["flatten"]),
    ],
}


@pytest.mark.parametrize("backend", PLACEMENT)
def test_where_quantizers_sit(backend):
    assert placed(bw.prepare(Probe(), image(), backend)) == PLACEMENT[backend]


@pytest.mark.parametrize("backend", PLACEMENT)
def test_every_quantizer_runs_once_for_each_tensor(backend):
    model = bw.prepare(Probe(), image(), backend)
    calls = Counter()
    for name, quantizer in quantizers(model).items():
        quantizer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    bw.calibrate(model, [image()])
    calls.clear()
    model(image())
    expected = Counter(f"bitwright.quantizers.{q}" for _, q, _ in PLACEMENT[backend])
    weights = [n for n in quantizers(model) if n.endswith("_weight_quantizer")]
    assert calls == expected + Counter(weights)


def test_layers_know_the_quantizer_of_their_input():
    model = bw.prepare(Probe(), image())
    shared = model.get_submodule("bitwright.quantizers.relu")
    for name in ("conv1", "branch"):
        assert isinstance(model.get_submodule(name).input_quantizer, PlacedQuantizer)
        assert model.get_submodule(name).input_quantizer.quantizer is shared
    assert model.fc.input_quantizer.quantizer is model.get_submodule("bitwright.quantizers.avg")
    assert model.fc.input_quantizer.spec == shared.spec
    assert not any("input_quantizer" in key for key in model.state_dict())
    assert "placed TensorQuantizer" in repr(model.fc.input_quantizer)


def test_the_probe_is_exact_when_off_and_close_when_on():
    net = Probe().eval()
    for norm in (net.bn, net.bn1, net.bn2, net.bn3):
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 1.5)
    for backend in PLACEMENT:
        model = bw.prepare(net, image(), backend)
        x = image(3)
        with torch.no_grad():
            assert torch.equal(model(x), net(x))
            bw.calibrate(model, [x])
            noise = (model(x) - net(x)).pow(2).mean() / net(x).pow(2).mean()
        assert float(noise) < 0.01


def test_a_layer_used_twice_has_a_quantizer_for_each_input():
    model = bw.prepare(Twice(), image(), "onnxruntime")
    names = [(tensor, quantizer) for tensor, quantizer, _ in placed(model)]
    assert ("x", "x") in names
    assert ("tanh", "tanh") in names
    wanted = [model.get_submodule(f"bitwright.quantizers.{name}") for name in ("x", "tanh")]
    assert [call.quantizer for call in model.conv.calls] == wanted
    bw.calibrate(model, [image(), 9 * image()])
    assert float(wanted[0].range()[1]) > 5
    assert float(wanted[1].range()[1]) <= 1.01


def test_a_float_operator_keeps_its_float_result_for_others():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            y = F.gelu(x)
            return self.conv(y), y

    model = bw.prepare(Fork(), image(), "onnxruntime")
    x = image()
    bw.calibrate(model, [x])
    assert torch.equal(model(x)[1], F.gelu(x))
    assert ("gelu", "gelu", ["conv"]) in placed(model)


def test_several_graph_inputs_and_constants():
    class Join(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.bias = nn.Parameter(torch.randn(4, 1, 1))

        def forward(self, x, y):
            return self.conv(x) + y + self.bias

    x, y = image(), torch.randn(2, 4, 16, 16)
    model = bw.prepare(Join(), (x, y), "onnxruntime")
    assert {tensor for tensor, _, _ in placed(model)} == {"x", "conv", "y", "add", "bias", "add_1"}
    bw.calibrate(model, [(x, y)])
    assert torch.allclose(model(x, y), model.conv(x) + y + model.bias, atol=0.2)


def test_a_node_may_be_called_like_a_method_of_modules():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.conv(x.half().to(torch.float32)) + self.conv(x.double().float())

    net, x = Cast().eval(), image()
    model = bw.prepare(net, x)
    bw.calibrate(model, [x])
    assert torch.allclose(model(x), net(x), atol=0.1)
    assert not {tensor for tensor, _, _ in placed(model)} & {"half", "to", "double", "float"}


@pytest.mark.parametrize(
    ("mover", "carries"),
    [
        (lambda x: F.interpolate(x, scale_factor=2), True),
        (lambda x: F.interpolate(x, None, 2, "nearest-exact"), True),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), False),
        (lambda x: F.interpolate(x, (5, 5), None, "bicubic"), False),
        (nn.Upsample(scale_factor=2), True),
        (nn.Upsample(scale_factor=2, mode="bilinear"), False),
        (lambda x: F.pad(x, (1, 1)), True),
        (lambda x: F.pad(x, (1, 1), value=0.0), True),
        (lambda x: F.pad(x, (1, 1), "constant", 1.5), False),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect", value=None), True),
        (nn.ZeroPad2d(1), True),
        (nn.ConstantPad2d(1, -3.0), False),
        (nn.ReflectionPad2d(1), True),
        (nn.ReplicationPad2d(1), True),
        (nn.CircularPad2d(1), True),
        (nn.MaxPool2d(2), True),
        (lambda x: F.max_pool2d(x, 2, ceil_mode=True), True),
        (nn.AdaptiveMaxPool2d(1), True),
        (lambda x: x.permute(0, 2, 3, 1).flatten(1)[:, None, None], True),
        (nn.Dropout(0.5), True),
        (lambda x: torch.chunk(x, 2, 1)[0], True),
        (lambda x: F.softplus(x), False),
    ],
)
def test_what_only_moves_values_carries_the_scale_on(mover, carries):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.LazyConv2d(2, 1)
            self.mover = mover

        def forward(self, x):
            return self.second(self.mover(self.first(x)))

    net, x = Net().eval(), image()
    net(x)
    model = bw.prepare(net, x, "openvino")
    names = [tensor for tensor, _, _ in placed(model)]
    assert len(names) == 2
    assert (names[1] == "first") is carries
    assert (Verdict.CARRIED in verdicts(model).values()) is carries


def test_readers_with_other_wishes_have_quantizers_of_their_own():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))
            self.pool = nn.MaxPool2d(2)

        def forward(self, x):
            x = self.pool(x)
            return self.a(x), self.b(x), self.c(x)

    model = bw.prepare(Fork(), image(), "openvino", recipe={"rules": [{"match": "b", "input": "int8"}]})
    # Readers of the pool disagree, so the pool reads float and each quantizes what comes out of it.
    assert sorted(placed(model)) == [("pool", "pool", ["a", "c"]), ("pool", "pool_for_b", ["b"])]
    assert str(model.b.input_quantizer.spec) == "int8 symmetric tensor"
    assert str(model.c.input_quantizer.spec) == "uint8 affine tensor"
    model = bw.prepare(Fork(), image(), "openvino", recipe={"rules": [{"match": "a", "input": "float"}]})
    assert placed(model) == [("pool", "pool", ["b", "c"])]
    assert specs(model)["a"] == ("int7 symmetric narrow channel:0", "", "")
    agreed = bw.prepare(Fork(), image(), "openvino", recipe={"rules": [{"match": "?", "input": "int8"}]})
    assert placed(agreed) == [("x", "x", ["pool"])]


def test_one_tensor_with_two_quantizers():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x):
            x = self.a(x)
            return self.b(x), self.c(x)

    model = bw.prepare(Fork(), image(), recipe={"rules": [{"match": "c", "input": "int8"}]})
    assert sorted(p for p in placed(model) if p[0] == "a") == [("a", "a", ["b"]), ("a", "a_for_c", ["c"])]
    bw.calibrate(model, [image()])
    x = image(3)
    with torch.no_grad():
        a = model.a(model.get_submodule("bitwright.quantizers.x")(x))
        expected = model.c(model.get_submodule("bitwright.quantizers.a_for_c")(a))
        end = model.get_submodule("bitwright.quantizers.c")
        assert torch.equal(model(x)[1], end(expected))


def test_a_rule_for_an_activation_speaks_of_the_fused_result():
    rules = [{"match": "block.1", "output": "int8 affine"}]
    model = bw.prepare(Small(), image(), recipe={"rules": rules})
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert entries["block.1"].verdict is Verdict.FUSED
    assert entries["block.1"].output == "int8 affine tensor"
    assert entries["block.2"].input == "int8 affine tensor"


def test_padding_with_minus_infinity_before_a_max_pool(tmp_path):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.head(F.max_pool2d(F.pad(self.conv(x), (1, 1, 1, 1), value=float("-inf")), 3, 2))

    model, x = Pooled().eval(), torch.randn(2, 3, 9, 9)
    prepared = bw.calibrate(bw.prepare(model, x), x)
    with torch.no_grad():
        assert (prepared(x) - model(x)).abs().max() < 0.05 * model(x).abs().max()
    path = bw.export(prepared, tmp_path / "padded.onnx")
    proof = bw.verify(prepared, path, x, runtimes=["onnxruntime"], latency=False).runtimes["onnxruntime"]
    assert proof.largest == 0
    assert proof.coverage == 1.0


def test_a_result_that_all_want_in_float_has_no_quantizer(tmp_path):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            y = torch.relu(self.first(x))
            return F.hardswish(self.second(y)) + y

    x = torch.randn(2, 3, 8, 8)
    model = bw.prepare(Gated().eval(), x, recipe={"rules": [{"match": "re:.*", "input": "float"}]})
    for node in model.graph.nodes:
        assert node.users or node.op == "output", f"nothing reads {node}"
    bw.calibrate(model, [x], progress=False)
    path = bw.export(model, tmp_path / "net.onnx")
    assert bw.verify(model, path, [x], latency=False, progress=False).ok
