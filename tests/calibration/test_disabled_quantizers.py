"""Quantizers that the user disabled stay disabled, and layers without ranges keep a float bias."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
import bitwright.nn as qnn
from bitwright.errors import CalibrationError
from bitwright.quantizer import Mode, QuantDescriptor, TensorQuantizer, quantizers

SEVEN = QuantDescriptor(num_bits=7, axis=0)


@pytest.fixture
def x():
    return torch.randn(6, 3, 8, 8)


@pytest.fixture
def model(x):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.Linear(6, 2)).eval()
    return bw.swap_modules(net, quant_desc_weight=SEVEN, example_inputs=x)


def test_a_dynamic_input_keeps_the_bias_float():
    layer = qnn.QuantLinear(5, 3)
    layer.quantize_bias = True
    assert layer.bias_scale() is None
    x = torch.randn(2, 5)
    step, rows = x.abs().max() / 127, layer.weight.abs().amax(1, keepdim=True) / 127
    want = F.linear((x / step).round() * step, (layer.weight / rows).round() * rows, layer.bias)
    assert torch.allclose(layer(x), want, atol=1e-5)
    layer.weight_quantizer.set_amax(layer.weight.detach().abs().amax(1, keepdim=True))
    assert layer.bias_scale() is None
    layer.input_quantizer.set_amax(1.0)
    assert torch.allclose(layer.bias_scale(), rows.detach().reshape(-1) / 127)


def test_calibrate_leaves_disabled_quantizers_alone(model, x):
    model[0].input_quantizer.disable()
    model[3].weight_quantizer.disable()
    bw.calibrate(model, [x])
    assert model[0].input_quantizer._disabled
    assert model[0].input_quantizer.amax is None
    assert model[3].weight_quantizer._disabled
    assert model[3].weight_quantizer.amax is None
    others = [q for q in quantizers(model).values() if not q._disabled]
    assert len(others) == 4
    assert all(q.mode is Mode.QUANTIZE for q in others)
    model[0].input_quantizer.enable()
    bw.calibrate(model, [x])
    assert torch.equal(model[0].input_quantizer.amax, x.abs().max())


def test_one_that_was_calibrated_keeps_its_range(model, x):
    bw.calibrate(model, [x])
    quantizer = model[3].input_quantizer
    before = quantizer.amax.clone()
    quantizer.disable()
    bw.calibrate(model, [3 * x])
    assert torch.equal(quantizer.amax, before)
    quantizer.enable()
    assert quantizer.mode is Mode.QUANTIZE


def test_disabled_is_saved_and_off_is_not_disabled(model):
    made = TensorQuantizer(QuantDescriptor(), disabled=True)
    assert not made.enabled
    made.load_state_dict(TensorQuantizer(QuantDescriptor()).state_dict())
    assert made.enabled
    fresh = TensorQuantizer(QuantDescriptor())
    fresh.load_state_dict(TensorQuantizer(QuantDescriptor(), disabled=True).state_dict())
    assert not fresh.enabled
    assert not any(not q.enabled for q in quantizers(model).values())  # swap_modules leaves them off, to be calibrated


def test_all_disabled(model, x):
    for quantizer in quantizers(model).values():
        quantizer.disable()
    with pytest.raises(CalibrationError, match=r"all 6 quantizers of the model are disabled; enable\(\) some"):
        bw.calibrate(model, [x])


@pytest.mark.parametrize("kept", ["input", "weight", "both"])
def test_disabled_quantizers_are_not_in_the_file(model, x, kept, tmp_path):
    layer = model[3]
    if kept != "weight":
        layer.input_quantizer.disable()
    if kept != "input":
        layer.weight_quantizer.disable()
    bw.calibrate(model, [x])
    path = bw.export(model, tmp_path / "model.onnx")
    # One step of what the last layer reads may round the other way.
    step = float(model[4].input_quantizer.amax) / 127
    reach = step * float(model[4].weight.detach().abs().sum(1).max())
    assert torch.allclose(bw.run_file(path)(x), model(x), atol=reach)


def test_disabled_in_graph_mode(x, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.by_hand = nn.Conv2d(3, 4, 3), TensorQuantizer(QuantDescriptor(), disabled=True)

        def forward(self, x):
            return self.by_hand(torch.relu(self.conv(x))) * 2

    model = bw.calibrate(bw.prepare(Net().eval(), x), [x])
    assert model.by_hand._disabled
    path = bw.export(model, tmp_path / "model.onnx")
    assert torch.allclose(bw.run_file(path)(x), model(x), atol=0.05)


@pytest.mark.parametrize("name", ["input", "weight"])
def test_the_quantizers_of_a_graph_can_be_disabled(x, name, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    model = bw.prepare(net, x, "onnxruntime")
    layer = model.get_submodule("2")
    quantizer = layer.weight_quantizer if name == "weight" else layer.input_quantizer.quantizer
    quantizer.disable()
    bw.calibrate(model, [x])
    assert not quantizer.quantizes
    assert not quantizer.calibrated
    assert sum(q.quantizes for q in quantizers(model).values()) == len(quantizers(model)) - 1
    path = bw.export(model, tmp_path / "model.onnx")
    assert torch.allclose(bw.run_file(path)(x), model(x), atol=0.02)
    quantizer.enable()
    bw.calibrate(model, [x])
    assert all(q.quantizes and q.calibrated for q in quantizers(model).values())


def test_a_quantizer_without_an_observer_stays_dynamic(model, x):
    model[0].input_quantizer._calibrator = None
    bw.calibrate(model, [x])
    assert model[0].input_quantizer.amax is None
    assert model[0].input_quantizer.quantizes
    assert model[3].input_quantizer.amax is not None


def test_layers_that_share_a_weight_quantizer_are_all_seen(model, x):
    shared = model[3]._weight_quantizer
    with torch.no_grad():
        model[4].weight.mul_(100)
    model[3]._weight_quantizer = model[4]._weight_quantizer = TensorQuantizer(QuantDescriptor(num_bits=7))
    assert shared is not model[3].weight_quantizer
    bw.calibrate(model, [x])
    assert torch.equal(model[3].weight_quantizer.amax, model[4].weight.detach().abs().max())
