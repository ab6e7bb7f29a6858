"""Capture: inputs and outputs of any nesting, and what a model is not given."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import BitwrightError, CaptureError, ConfigError
from tests.graph.capture.capturing import Net, image, prepared

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    size: int = 0


class Output(OrderedDict):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


def test_keyword_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, image, other, scale=1.0, mask=None):
            out = self.conv(image) * scale - other.mean()
            return out if mask is None else out * mask

    x, y = image(), image()
    quantized = prepared(Two(), {"image": x, "other": y}, {"image": image(3), "other": y})
    assert [n.target for n in quantized.graph.nodes if n.op == "placeholder"] == ["image", "other"]
    assert torch.equal(quantized(x, y), quantized(other=y, image=x))
    prepared(Two(), (x, y, 2.0), (image(1), y, 2.0))
    prepared(Two(), (x, y, 2.0, None))
    prepared(Two(), {"other": y, "image": x, "mask": torch.ones(8)})


def test_numbers_and_none_are_part_of_the_program():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, scale=1.0, mask=None, mode="plain"):
            x = self.fc(x) * scale
            return (x if mask is None else x * mask) if mode == "plain" else -x

    x = torch.randn(2, 3)
    quantized = prepared(Scaled(), (x, 2.0, None, "plain"))
    assert [e.name for e in bw.ledger_of(quantized).entries] == ["fc", "mul"]
    for given, message in (
        ((x, 3.0, None, "plain"), "the input 'scale' must be 2.0, as when the model was captured, not 3.0"),
        ((x, 2.0, torch.ones(3), "plain"), "the input 'mask' must be None, .* not tensor"),
        ((x, 2.0, None, "other"), "the input 'mode' must be 'plain', .* not 'other'"),
    ):
        with pytest.raises(ConfigError, match=message):
            quantized(*given)


def test_builtin_names_as_inputs():
    class Shadow(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, input, filter):
            return self.fc(input) + filter

    prepared(Shadow(), {"input": torch.randn(2, 3), "filter": torch.randn(2, 2)})


def test_variable_inputs():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, first, *rest, **named):
            out = self.fc(first)
            for value in rest:
                out = out + self.fc(value)
            for key in named:
                out = out * named[key]
            return out

    x = torch.randn(2, 3)
    model = Many().eval()
    quantized = bw.prepare(model, (x, x + 1, x + 2))
    assert torch.equal(quantized(x, x - 1, x), model(x, x - 1, x))
    quantized = bw.prepare(model, {"first": x, "scale": torch.tensor(2.0)})
    assert torch.equal(quantized(first=x, scale=torch.tensor(3.0)), model(x, scale=torch.tensor(3.0)))


def test_nested_inputs():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, batch, pair):
            first, (second, third) = pair
            out = self.fc(batch["x"]) + self.fc(first) - second
            if "y" in batch:
                out = out * batch["y"]
            return out + sum(third)

    def inputs(n):
        x = torch.randn(n, 3)
        return ({"x": x, "y": torch.randn(n, 2)}, (x, (torch.randn(n, 2), [torch.ones(2), torch.ones(2)])))

    prepared(Nested(), inputs(2), inputs(3))


@pytest.mark.parametrize(
    "body",
    [
        lambda self, x: (self.conv(x), x.shape[0]),
        lambda self, x: [self.conv(x), (x, x.mean())],
        lambda self, x: {"out": self.conv(x), "aux": {"size": x.shape[-1], "none": None}},
        lambda self, x: Pair(self.conv(x), x),
        lambda self, x: (self.conv(x), None, 3, "text"),
        lambda self, x: OrderedDict(out=self.conv(x)),
        lambda self, x: Output(out=self.conv(x), more=(x,)),
        lambda self, x: Result(self.conv(x), x.shape[0]),
    ],
)
def test_outputs_of_any_shape(body):
    model, x = Net(body), image()
    quantized = prepared(model, x, image(3))
    assert type(quantized(x)) is type(model(x))
    assert {e.operator for e in bw.ledger_of(quantized).entries} <= {"conv2d", "mean"}


def test_no_batch_dimension():
    prepared(Net(lambda self, x: self.conv(x)), torch.randn(3, 8, 8))


def test_what_is_not_a_module():
    with pytest.raises(ConfigError, match=r"the model must be a torch.nn.Module, not function"):
        bw.prepare(lambda x: x, torch.ones(1))
    with pytest.raises(ConfigError, match=r"the model must be a torch.nn.Module, not str"):
        bw.prepare("resnet18", torch.ones(1))
    with pytest.raises(ConfigError, match=r"the model must be a torch.nn.Module, not the class ReLU: create one"):
        bw.prepare(nn.ReLU, torch.ones(1))


def test_example_inputs_the_model_refuses():
    model = Net(lambda self, x: self.conv(x))
    with pytest.raises(ConfigError, match=r"Net does not take the example inputs \(float32\[2, 5\]\): RuntimeError"):
        bw.prepare(model, torch.randn(2, 5))
    with pytest.raises(ConfigError, match=r"Sequential does not take .* \(x=float32\[1\], n=3\): TypeError"):
        bw.prepare(nn.Sequential(nn.ReLU()), {"x": torch.ones(1), "n": 3})


def test_a_model_that_is_never_the_same_is_refused():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            calls.append(1)
            return self.fc(x) + len(calls)

    calls = []

    with pytest.raises(CaptureError, match="the captured Fickle and the original compute different results") as caught:
        bw.prepare(Fickle(), torch.ones(1, 2))
    assert isinstance(caught.value, BitwrightError)
