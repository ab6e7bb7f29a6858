import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.graph.names import Namespace, namespace
from bitwright.quantizer import quantizers

X = torch.randn(4, 3, 8, 8)
# Names of containers, now and before, and of what is inside them.
NAMES = [
    "bitwright",
    "at",
    "activation_quantizers",
    "quantized_functions",
    "calls",
    "quantizers",
    "functions",
    "folded_stand_in",
    "constants",
]


class Nested(nn.Module):
    """A convolution under ``outer.inner``, and one under ``inner`` of the root."""

    def __init__(self, name, inner):
        super().__init__()
        self.name = name
        holder = nn.Module()
        holder.add_module(inner, nn.Conv2d(4, 4, 3, padding=1))
        self.add_module(name, nn.Conv2d(3, 4, 3, padding=1))
        self.holder = holder
        self.inner = inner
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        x = F.relu(getattr(self, self.name)(x))
        x = x + getattr(self.holder, self.inner)(x)
        return F.linear(x.mean((2, 3)), self.weight)


def exported(model, path):
    import onnx

    prepared = bw.calibrate(bw.prepare(model.eval(), X, "onnxruntime"), [X])
    file = bw.export(prepared, path / "m.onnx")
    return prepared, onnx.load(file)


def operators(graph):
    return sorted(n.op_type for n in graph.graph.node)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same net with names that nothing else uses, and its file."""
    torch.manual_seed(0)
    return exported(Nested("conv", "conv"), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nested", [False, True])
def test_modules_named_like_ours(name, nested, plain, tmp_path):
    torch.manual_seed(0)
    model = Nested("conv" if nested else name, name)
    first, reference = plain
    prepared, graph = exported(model, tmp_path)
    assert operators(graph) == operators(reference)
    assert operators(graph).count("QuantizeLinear") == 6
    torch.testing.assert_close(prepared(X), first(X), rtol=0, atol=0)
    assert bw.verify(prepared, tmp_path / "m.onnx", [X], latency=False).ok
    assert isinstance(prepared.get_submodule(name if not nested else f"holder.{name}"), nn.Conv2d)
    model.load_state_dict({k: v for k, v in prepared.state_dict().items() if k in model.state_dict()})


class WithAttribute(nn.Module):
    def __init__(self, name, kind):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.name = name
        value = torch.full((1,), 2.0)
        if kind == "buffer":
            self.register_buffer(name, value)
        elif kind == "method":
            setattr(type(self), name, lambda self: 2.0)
        else:
            setattr(self, name, {"parameter": nn.Parameter(value), "tensor": value, "number": 2.0}[kind])

    def forward(self, x):
        value = getattr(self, self.name)
        return torch.relu(self.conv(x)) * (value() if callable(value) else value)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "tensor", "number", "method"])
@pytest.mark.parametrize("name", NAMES[:4])
def test_attributes_named_like_ours(name, kind, tmp_path):
    cls = type("Own", (WithAttribute,), {})
    model = cls(name, kind).eval()
    prepared, graph = exported(model, tmp_path)
    assert operators(graph).count("QuantizeLinear") >= 1
    fresh = bw.prepare(model, X, "onnxruntime")
    assert torch.equal(fresh(X), model(X))
    value = getattr(prepared, name)
    assert (value() if callable(value) else value) == 2.0
    assert namespace(prepared) == ("bitwright_1" if name == "bitwright" else "bitwright")


@pytest.mark.parametrize("name", ["conv", "bitwright"])
def test_names_depend_on_the_model_alone(name):
    model = Nested(name, "bitwright").eval()
    first = bw.calibrate(bw.prepare(model, X, "onnxruntime"), [X])
    second = bw.prepare(copy.deepcopy(model), X, "onnxruntime")
    assert [name for name, _ in first.named_modules()] == [name for name, _ in second.named_modules()]
    second.load_state_dict(first.state_dict())
    assert list(first.state_dict()) == list(second.state_dict())
    assert list(copy.deepcopy(first).state_dict()) == list(first.state_dict())
    assert sum(isinstance(m, Namespace) for m in copy.deepcopy(first).modules()) == 1


class Training(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.x_for_b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, training, forward):
        return self.a(training) + self.b(self.x_for_b(forward))


def test_inputs_named_like_attributes_of_modules():
    inputs = (torch.randn(2, 4), torch.randn(2, 4))
    model = Training().eval()
    prepared = bw.prepare(model, inputs, "onnxruntime")
    assert torch.equal(prepared(*inputs), model(*inputs))
    bw.calibrate(prepared, [inputs])
    assert all(q.calibrated for q in quantizers(prepared).values())


def test_a_tensor_named_like_the_quantizer_of_another_reader():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d, self.a_for_c = (nn.Linear(4, 4) for _ in range(5))

        def forward(self, x):
            a = self.a(x)
            return self.b(a) + self.c(a) + self.d(self.a_for_c(x))

    recipe = {
        "backend": "academic",
        "weight": "int8",
        "activation": "uint8",
        "rules": [{"match": "c", "input": "uint4"}],
    }
    x = torch.randn(2, 4)
    prepared = bw.calibrate(bw.prepare(Net().eval(), x, recipe=recipe), [x])
    bits = {name: getattr(prepared, name).input_quantizer.quantizer.spec.bits for name in "bcd"}
    assert bits == {"b": 8, "c": 4, "d": 8}
    assert sum(q.spec.bits == 4 for q in quantizers(prepared).values()) == 1
    assert prepared(x).isfinite().all()


def test_a_region_inside_an_island_has_a_namespace_of_its_own():
    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.bitwright = Nested("bitwright", "at")

        def forward(self, x):
            return self.bitwright(x) if float(x.detach().numpy().sum()) < 1e9 else x

    model = Island().eval()
    prepared = bw.prepare(model, X, "onnxruntime")
    assert torch.equal(prepared(X), model(X))
    assert isinstance(prepared.bitwright.bitwright, nn.Conv2d)
    assert namespace(prepared.bitwright) == "bitwright_1"
    bw.calibrate(prepared, [X])
    assert any(name.startswith("bitwright.bitwright_1.quantizers.") for name in quantizers(prepared))
