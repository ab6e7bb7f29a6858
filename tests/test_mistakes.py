"""Mistakes that newcomers make are answered with what was given, what is wanted, and what to do."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.backends import find_backend, register_backend
from bitwright.errors import BitwrightError
from bitwright.exporting import FORMATS
from bitwright.exporting.deploy import deploy
from bitwright.exporting.formats.base import register_format
from bitwright.methods import METHODS, Method, register_method
from bitwright.nn import QuantOpr, register_qmodule
from bitwright.observers import OBSERVERS, register_observer
from bitwright.observers.minmax import MinMaxObserver
from bitwright.verification import RUNTIMES, Runtime, register_runtime

X = torch.randn(2, 3, 8, 8)


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(x.flatten(2))


@pytest.fixture(scope="module")
def model():
    return bw.calibrate(bw.prepare(net(), X), [X])


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: bw.prepare(Other, X), "not the class Other: create one"),
        (lambda: bw.prepare(net(), (4, 3, 8, 8)), r"if that is a shape, give torch.randn\(4, 3, 8, 8\)"),
        (lambda: bw.prepare(net(), X.numpy()), r"a NumPy array, not a tensor, of float32\[2, 3, 8, 8\]"),
        (lambda: bw.prepare(net(), X, X), "backend must be a name or a Backend, not tensor"),
        (lambda: bw.calibrate(net(), [X]), r"give what prepare\(model, inputs\) returns"),
    ],
    ids=["class", "shape", "numpy", "inputs side by side", "float model"],
)
def test_before_there_is_a_model(mistake, words):
    with pytest.raises(bw.BitwrightError, match=words) as caught:
        mistake()
    assert len(str(caught.value)) < 2000


class Off(Method):
    """Computes other values than its integers stand for."""

    def forward(self, x, scale, zero_point):
        return x * 0.9


class Lost(Method):
    """Loses the largest value."""

    def forward(self, x, scale, zero_point):
        kept = self.values(self.integers(x, scale, zero_point), scale, zero_point)
        return kept.masked_fill(x == x.max(), float("nan"))


class NoRounding(Method):
    pass


class Levels(Off):
    uniform = False

    def levels(self):
        return torch.tensor([1.0, 0.0, -1.0])


class Peaks(MinMaxObserver):
    def range(self):
        return self.hi


class Backwards(MinMaxObserver):
    def range(self):
        return super().range()[::-1]


def extension(kind, cls, **method):
    return type(cls.__name__, (cls,), {"__module__": "mine", "__qualname__": cls.__name__, **method})


def simulated(tmp_path=None, **activation):
    model = bw.calibrate(bw.prepare(net(), X, recipe={"activation": activation}), [X])
    return deploy(model)


@pytest.fixture
def forget():
    """Unregister what a test registers."""
    before = [(r, dict(r._items)) for r in (OBSERVERS, METHODS, FORMATS, RUNTIMES)]
    yield
    for registry, items in before:
        registry._items = items


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: register_observer(MinMaxObserver), "name the observer that you register, as in .* is no name"),
        (lambda: register_observer("Mine")(Method), r"Method must be a class derived from Observer: see docs/how-to"),
        (lambda: register_method("Mine")(NoRounding), r"must define how it rounds, in forward\(x, scale, zero_point\)"),
        (
            lambda: register_method("Mine")(extension("method", Off, start=lambda self: None)),
            r"Off\.start must take scale, zero_point \(too many positional",
        ),
        (
            lambda: register_method("Mine")(extension("method", Off, __init__=lambda self, spec, strength: None)),
            r"__init__ must take spec \(missing a required argument: 'strength'\); other arguments need defaults",
        ),
        (lambda: register_method("Mine")(Levels) and simulated(method="Mine"), "levels must return .* rising numbers"),
        (lambda: register_observer("Mine")(Peaks) and simulated(observer="Mine"), "range must return two tensors, not"),
        (lambda: register_observer("Mine")(Backwards) and simulated(observer="Mine"), "highest value below the lowest"),
        (lambda: register_runtime("Mine")(extension("runtime", Runtime)), "does not define executed and session and"),
        (lambda: register_format("Mine")(3), "3 must be a class derived from ExportFormat"),
        (lambda: register_qmodule(QuantOpr), "say what .*QuantOpr replaces"),
        (lambda: register_qmodule(["reluu"]), "'reluu' is no method of a tensor: did you mean 'relu'"),
        (lambda: register_backend({"name": "mine"}), "register_backend needs a Backend, not"),
        *(
            (lambda rule=rule: bw.prepare(net(), X, backend_with(rule)), words)
            for rule, words in [
                (lambda node: node.kwargs["dim"], "the condition of mine for conv2d fails on _0: KeyError: 'dim'"),
                (lambda node: True, "for conv2d must return a reason in words or None, not True"),
            ]
        ),
    ],
)
def test_extensions_that_cannot_work(mistake, words):
    with pytest.raises(BitwrightError, match=words):
        mistake()


def backend_with(rule):
    return find_backend("onnxruntime").with_(name="mine", operators={"conditions": {"conv2d": rule}})


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("method", [Off, Lost])
def test_a_method_that_computes_other_values_than_it_stores_is_not_proven(method, tmp_path):
    register_method(method.__name__)(method)
    model = bw.calibrate(bw.prepare(net(), X, recipe={"activation": {"method": method.__name__}}), [X])
    proof = bw.verify(model, bw.export(model, tmp_path / "off.onnx"), [X], runtimes="onnxruntime", latency=False)
    assert proof.runtimes["onnxruntime"].largest > 1
    assert not proof.ok


def test_numpy_arrays_are_named(model, tmp_path):
    path = bw.export(model, tmp_path / "net.onnx")
    with pytest.raises(bw.BitwrightError, match=r"the file takes input, and the batch is \(a NumPy array"):
        bw.verify(model, path, [X.numpy()])


def test_budgets_have_units(model):
    with pytest.raises(bw.BitwrightError, match=r"keeps size at 0.5 bytes: the least possible is \d+ bytes"):
        bw.search_bits(model, [X], {"size": 0.5})


def test_a_loss_is_a_function(model):
    with pytest.raises(bw.BitwrightError, match="cross_entropy, not 'ce'"):
        bw.train(model, [(X, torch.zeros(2, dtype=torch.long))], "ce")
