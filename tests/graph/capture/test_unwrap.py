"""Capture: compiled and scripted modules, computed weights, and subclasses that compute what torch's modules do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

import bitwright as bw
from bitwright.errors import ConfigError, ExportError
from bitwright.nn import QuantConv2d, QuantLinear
from tests.graph.capture.capturing import image, prepared


class Scaled(nn.Module):
    """A parametrization of our own."""

    def forward(self, weight):
        return weight * 2 - 1


class Noisy(nn.Module):
    """A parametrization that gives another weight at every call."""

    def forward(self, weight):
        return weight + torch.rand(())


def parametrized(make):
    """Two layers with computed weights, the first before a BatchNorm."""
    torch.manual_seed(0)
    conv, head = make(nn.Conv2d(3, 4, 3, padding=1)), make(nn.Linear(4, 5))
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def own(layer):
    parametrize.register_parametrization(layer, "bias", Scaled())
    parametrize.register_parametrization(layer, "weight", Scaled())
    layer.parametrizations.weight.original.requires_grad_(False)
    return layer


WAYS = [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal, weight_norm]


@pytest.mark.parametrize("make", [*WAYS, spectral_norm, own], ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_computed_weights_are_computed_once(make):
    model = parametrized(make)
    model(image())  # the first power iterations
    state = {name: value.clone() for name, value in model.state_dict().items()}
    quantized = prepared(model.eval(), image(), image(4, 12))
    assert type(quantized.get_submodule("0")) is QuantConv2d
    assert type(quantized.get_submodule("5")) is QuantLinear
    assert quantized.get_submodule("0").after, "the norm is folded"
    assert {"0.weight", "0.bias", "5.weight", "5.bias"} <= quantized.state_dict().keys()
    assert all(p.requires_grad == (make is not own) for n, p in quantized.named_parameters() if n == "0.weight")
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.train()(image())
    quantized = bw.calibrate(quantized, [image()])
    assert torch.isfinite(quantized(image())).all()


def test_weights_that_are_drawn_at_every_call_stay_as_they_are():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    parametrize.register_parametrization(model[0], "weight", Noisy())
    quantized = bw.prepare(model.eval(), image())
    assert parametrize.is_parametrized(quantized.get_submodule("0"), "weight")


class Named(nn.Conv2d):
    """Computes what nn.Conv2d does."""

    def __init__(self, width):
        super().__init__(3, width, 3, padding=1)
        self.note = "mine"

    def extra_repr(self):
        return f"{super().extra_repr()}, {self.note}"


class Standardized(nn.Conv2d):
    """Computes something else."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Doubling(nn.Linear):
    """Computes something else."""

    def forward(self, x):
        return super().forward(x) * 2


class Mine(nn.BatchNorm2d):
    pass


def test_a_norm_is_folded_into_a_subclass_that_computes_the_same():
    model = nn.Sequential(Named(4), Mine(4), nn.ReLU(), Standardized(4, 4, 1), nn.BatchNorm2d(4), Doubling(8, 2))
    quantized = prepared(model, image(), image(4))
    conv = quantized.get_submodule("0")
    assert type(conv) is QuantConv2d
    assert conv.after
    assert conv.note == "mine"
    assert [type(quantized.get_submodule(name)) for name in ("3", "5")] == [Standardized, Doubling]
    x = image()
    with torch.no_grad():
        expected = model(x)
        assert (bw.calibrate(quantized, [x])(x) - expected).abs().max() < 0.2 * expected.abs().max()


def test_compiled_modules_are_prepared_as_what_they_were_made_from():
    inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 4, 1), torch.compile(inner, backend="eager")).eval()
    x = image()
    for given in (model, torch.compile(model, backend="eager")):
        quantized = bw.prepare(given, x, leaves=["1.1"])
        assert bw.ledger_of(quantized).islands == {}
        assert [type(quantized.get_submodule(name)) for name in ("0", "1.0")] == [QuantConv2d] * 2
        with torch.no_grad():
            assert torch.equal(quantized(x), nn.Sequential(model[0], inner)(x))
    assert type(model[1]) is not nn.Sequential


def test_a_module_compiled_in_place_is_captured():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    expected = copy.deepcopy(model)
    model.compile(backend="eager")
    x = image()
    model(x)
    quantized = bw.prepare(model, x)
    assert bw.ledger_of(quantized).islands == {}
    with torch.no_grad():
        assert torch.equal(quantized(x), expected(x))


def test_scripted_modules_are_refused_or_leaves(tmp_path):
    with pytest.raises(ConfigError, match=r"whose code cannot be captured: give the nn.Module that it"):
        bw.prepare(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 1))), image())
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))
    quantized = prepared(nn.Sequential(nn.Conv2d(3, 4, 1), scripted), image(), image(4))
    assert type(quantized.get_submodule("0")) is QuantConv2d
    assert bw.calibrate(quantized, [image()])(image()).shape == (2, 4, 8, 8)
    with pytest.raises(
        ExportError, match=r"'1' is a TorchScript module, which no file can hold: put the nn\.Module in"
    ):
        bw.export(quantized, tmp_path / "scripted.onnx", dynamic_shapes=False)


def test_lazy_modules_get_their_sizes_in_the_copy():
    model = nn.Sequential(nn.LazyConv2d(4, 1), nn.Flatten(), nn.LazyLinear(3))
    quantized = bw.prepare(model, image())
    assert (quantized.get_submodule("0").in_channels, quantized.get_submodule("2").in_features) == (3, 256)
    assert type(model[0]) is nn.LazyConv2d
