"""SiLU, hard-sigmoid and hard-swish become operators that onnxruntime computes in integers."""

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import bitwright as bw
from bitwright.nn.activation_parts import gated
from bitwright.quantizer import quantizers

MODULES = {"silu": nn.SiLU, "hardsigmoid": nn.Hardsigmoid, "hardswish": nn.Hardswish}
FUNCTIONS = {"silu": F.silu, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish}


class Activated(nn.Module):
    """Convolutions with an activation between, and a result that nothing can be folded into."""

    def __init__(self, activation):
        super().__init__()
        self.conv, self.activation, self.last = nn.Conv2d(2, 4, 3, padding=1), activation, nn.MaxPool2d(2)

    def forward(self, x):
        return self.last(self.activation(4 * self.conv(x)))


def calibrated(net, x, **settings):
    model = bw.prepare(net, x, "onnxruntime", **settings)
    return bw.calibrate(model, [x], progress=False)


def kinds(model):
    return {entry.node: (entry.operator, entry.verdict.value) for entry in bw.ledger_of(model).entries}


def named(model):
    return [(entry.name, entry.operator, entry.verdict.value) for entry in bw.ledger_of(model).entries]


def notes(model):
    return [note for note in bw.ledger_of(model).notes if note.startswith("split_activations")]


@pytest.mark.parametrize("activation", [*(m() for m in MODULES.values()), *FUNCTIONS.values(), nn.SiLU(inplace=True)])
def test_parts_are_proven_integers_and_equal_the_whole_before(activation, tmp_path):
    torch.manual_seed(0)
    net, x = Activated(activation).eval(), 3 * torch.randn(4, 2, 9, 7)
    model = bw.prepare(net, x, "onnxruntime")
    for value in (x, torch.randn(1, 2, 12, 8), x.to(memory_format=torch.channels_last), x[:, :, ::2]):
        assert torch.equal(model(value), net(value))
    bw.calibrate(model, [x], progress=False)
    proof = bw.verify(model, bw.export(model, tmp_path / "net.onnx"), [x], latency=False, progress=False)
    assert proof.ok, proof.missed
    assert proof.runtimes["onnxruntime"].coverage == 1.0
    assert (model(x) - net(x)).abs().max() < 0.05 * net(x).abs().max()


@pytest.mark.parametrize("name", MODULES)
def test_files_compute_the_formula(name, tmp_path):
    """Against the written-out function in float64, of integers that a convolution passes through exactly."""
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(1), MODULES[name]()).eval()
    with torch.no_grad():
        net[0].weight.fill_(1)
        net[0].bias.zero_()
    x = torch.linspace(-8, 8, 256).reshape(1, 1, 16, 16)
    model = calibrated(net, x)
    session = onnxruntime.InferenceSession(bw.export(model, tmp_path / "net.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    t = x.double()
    gate = 1 / (1 + (-t).exp()) if name == "silu" else ((t + 3).clamp(0, 6) / 6)
    wanted = gate if name == "hardsigmoid" else t * gate
    assert (torch.from_numpy(found) - wanted).abs().max() < 0.12  # a step of the input is 16/255, of the result 8.4/255


def test_a_factor_is_part_of_the_scale(tmp_path):
    x = torch.randn(2, 2, 8, 8)
    model = calibrated(Activated(F.hardswish), x)
    assert [kind for kind in kinds(model).values() if kind[0] == "div"] == [("div", "fused")]
    graph = onnx.load(bw.export(model, tmp_path / "net.onnx")).graph
    assert "Div" not in {node.op_type for node in graph.node}
    values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    readers = {name: node for node in graph.node for name in node.input}
    ratios = [
        values[node.input[1]] / values[readers[node.output[0]].input[1]]
        for node in graph.node
        if node.op_type == "QuantizeLinear"
    ]
    assert sorted(round(float(ratio), 5) for ratio in ratios)[-2:] == [1.0, 6.0]
    assert sum(ratio > 1.5 for ratio in ratios) == 1


def test_other_factors_are_part_of_the_scale_too(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3)

        def forward(self, x):
            total = torch.relu(self.a(x) + self.b(x)) / 2**0.5
            return F.max_pool2d(total, 2), total * -1.0

    x = torch.randn(2, 2, 8, 8)
    model = calibrated(Net().eval(), x)
    found = kinds(model)
    assert found["truediv"] == ("div", "fused")
    assert found["mul"][1] == "float"  # not positive
    proof = bw.verify(model, bw.export(model, tmp_path / "net.onnx"), [x], latency=False, progress=False)
    assert proof.ok, proof.missed


def test_a_factor_of_a_tensor_that_others_read_stays(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3)

        def forward(self, x):
            total = self.a(x) + self.b(x)
            return total / 2, F.max_pool2d(total, 2)

    x = torch.randn(2, 2, 8, 8)
    model = calibrated(Net().eval(), x)
    assert kinds(model)["truediv"][1] == "float"
    proof = bw.verify(model, bw.export(model, tmp_path / "net.onnx"), [x], latency=False, progress=False)
    assert proof.ok, proof.missed


def test_what_stays_whole():
    linear = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2)).eval()
    model = bw.prepare(linear, torch.randn(3, 4), "onnxruntime")
    assert ("1", "silu", "float") in named(model)
    assert notes(model) == [
        "split_activations: not split: 1, its input is the result of a linear layer or a norm",
    ]
    hooked = Activated(nn.SiLU()).eval()
    hooked.activation.register_forward_hook(lambda *_: None)
    model = bw.prepare(hooked, torch.randn(2, 2, 8, 8), "onnxruntime")
    assert notes(model) == ["split_activations: not split: activation, it has hooks"]
    double = Activated(nn.SiLU()).eval().double()
    model = bw.prepare(double, torch.randn(2, 2, 8, 8).double(), "onnxruntime")
    assert kinds(model)["activation"][0] == "silu"
    model = bw.prepare(Activated(nn.SiLU()).eval(), torch.randn(2, 2, 8, 8), "openvino")
    assert kinds(model)["activation"][0] == "silu"


class Twice(nn.Module):
    """An activation that is called twice, as a module of its own and in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.activation = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.SiLU(inplace=True)

    def forward(self, x):
        return F.max_pool2d(self.activation(self.second(self.activation(self.first(x)))), 2)


def test_parts_are_listed_under_the_name_of_the_whole():
    x = torch.randn(2, 2, 8, 8)
    parts = [("sigmoid", "integer"), ("mul", "integer")]
    assert [n for n in named(bw.prepare(Activated(nn.SiLU()).eval(), x, "onnxruntime")) if n[0] == "activation"] == [
        ("activation", *part) for part in parts
    ]
    model = bw.prepare(Activated(F.silu).eval(), x, "onnxruntime")
    assert [n for n in named(model) if n[0] == "silu"] == [("silu", *part) for part in parts]
    labels = [q.label for q in quantizers(model).values()]
    assert {"output of silu (sigmoid)", "output of silu (gated)"} < set(labels)
    model = bw.prepare(Twice().eval(), x, "onnxruntime")
    assert [n[0] for n in named(model) if n[1] in ("sigmoid", "mul")] == ["activation"] * 4


@pytest.mark.parametrize("selector", ["activation", "op:{}", "node:activation", "type:{}"])
@pytest.mark.parametrize("name", MODULES)
def test_what_is_skipped_stays_whole(name, selector):
    module = MODULES[name]
    match = selector.format(name if selector.startswith("op") else module.__name__)
    model = bw.prepare(Activated(module()).eval(), torch.randn(2, 2, 8, 8), "onnxruntime", skip=[match])
    assert ("activation", name, "float") in named(model)
    assert notes(model) == [f"split_activations: not split: activation, skipped by the rule {match!r}"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_are_skipped_stay_whole(name):
    for match in (f"op:{name}", f"node:{name}", name):
        model = bw.prepare(Activated(FUNCTIONS[name]).eval(), torch.randn(2, 2, 8, 8), "onnxruntime", skip=[match])
        assert (name, name, "float") in named(model)


def test_one_call_of_two_is_skipped():
    model = bw.prepare(Twice().eval(), torch.randn(2, 2, 12, 12), "onnxruntime", skip=["node:activation_1"])
    assert [n[1:] for n in named(model) if n[0] == "activation"] == [
        ("sigmoid", "integer"),
        ("mul", "integer"),
        ("silu", "float"),
    ]


def test_rules_for_the_whole_set_its_parts():
    rules = [{"match": "op:silu", "output": {"observer": "PercentileObserver"}}]
    model = bw.prepare(Activated(F.silu).eval(), torch.randn(2, 2, 8, 8), "onnxruntime", recipe={"rules": rules})
    found = {q.label: type(q.observer).__name__ for q in quantizers(model).values()}
    assert found["output of silu (gated)"] == "PercentileObserver"
    assert found["output of conv"] == "MinMaxObserver"


def test_gated_has_the_gradient_of_silu():
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    gated(x, torch.sigmoid(x)).square().sum().backward()
    F.silu(y).square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-12)
    z, gate = (torch.randn(50, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(gated, (z, gate))
