"""Weight sites: every weight as it is quantized, folds multiplied in, and all that goes through them."""

import pytest
import torch
from torch import nn

import bitwright as bw
import bitwright.nn as qnn
from bitwright.compat.pytorch_quantization.calib import calibrate_weights
from bitwright.compat.pytorch_quantization.optim import helper
from bitwright.nn.weight_sites import weight_sites
from bitwright.quantizer import QuantDescriptor, TensorQuantizer, quantizers


def folded(x, inputs=False):
    """A prepared net with a BatchNorm after, or before, a convolution; it scales channels by 0.2 to 5."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(4, 4, 3, bias=True), nn.BatchNorm2d(4)
    net = nn.Sequential(norm, conv) if inputs else nn.Sequential(conv, norm, nn.ReLU())
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.2, 1.0, -2.0, 5.0]))
        norm.bias.uniform_(-1, 1)
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 3.0)
    model = bw.prepare(net.eval(), x, "onnxruntime", recipe={"schedules": {"fold_before": {"spread": 1000}}})
    (site,) = weight_sites(model)
    assert site.layer.before if inputs else site.layer.after
    return model, site


@pytest.fixture
def x():
    return torch.randn(4, 4, 8, 8)


def test_the_weight_is_the_one_that_is_quantized(x):
    model, site = folded(x)
    norm = site.layer.folded_norm
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    assert site.name == "0"
    assert site.quantizer is site.layer.weight_quantizer
    assert torch.allclose(site.weight(), site.layer.weight * factor.reshape(-1, 1, 1, 1))
    bw.calibrate(model, [x])
    largest = site.weight().abs().amax((1, 2, 3))
    assert torch.allclose(site.quantizer.amax, largest)


def test_every_kind_of_layer_has_its_sites():
    model = nn.ModuleDict(
        {
            "linear": qnn.QuantLinear(3, 2),
            "lstm": qnn.QuantLSTM(3, 4, num_layers=2),
            "attention": qnn.QuantMultiheadAttention(8, 2),
            "embedding": qnn.QuantEmbedding(5, 3),
            "pool": qnn.QuantMaxPool2d(2),
            "plain": nn.Linear(2, 2),
        }
    )
    own = nn.Linear(4, 4)
    own.weight_quantizer = TensorQuantizer(QuantDescriptor(axis=0))
    model["own"] = own
    found = {(site.name, site.key): tuple(site.weight().shape) for site in weight_sites(model)}
    assert found == {
        ("linear", "_weight_quantizer"): (2, 3),
        ("lstm", "_weight_quantizers.0"): (16, 7),
        ("lstm", "_weight_quantizers.1"): (16, 8),
        ("attention", "_weight_quantizer"): (24, 8),
        ("attention", "_out_weight_quantizer"): (8, 8),
        ("embedding", "_weight_quantizer"): (5, 3),
        ("own", "weight_quantizer"): (4, 4),
    }
    named = {name for name in quantizers(model) if "weight" in name}
    assert {f"{name}.{key}" for name, key in found} == named


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("method", ["max", "mse", "percentile"])
def test_calibrate_weights_heeds_what_is_folded_in(x, method, inputs):
    model, site = folded(x, inputs)
    calibrate_weights(model, method, percentile=100.0)
    largest = site.weight().detach().abs().amax((1, 2, 3))
    found = site.quantizer.amax.reshape(-1)
    assert bool(((found <= largest * 1.001) & (found >= largest * 0.7)).all())
    bare = site.layer.weight.detach().abs().amax((1, 2, 3))
    assert float((largest / bare).max()) > 1.2  # it makes a difference
    bw.calibrate(model, [x])
    if method != "mse":
        bins = 1e-3 if method == "percentile" else 1e-5  # a histogram's last bin begins below the largest value
        assert torch.allclose(site.quantizer.amax.reshape(-1), found, rtol=bins)


@pytest.mark.parametrize("inputs", [False, True])
def test_weights_quantized_in_place_heed_what_is_folded_in(x, inputs):
    model, site = folded(x, inputs)
    bw.calibrate(model, [x])
    for quantizer in quantizers(model).values():
        if quantizer is not site.quantizer:
            quantizer.off()
    expected, weight = model(x), site.quantizer(site.weight())
    helper.quant_weight_inplace(model)
    assert not site.quantizer.enabled
    assert torch.allclose(site.weight(), weight, atol=1e-6)
    # What a norm before the layer adds goes through the quantized weight now, and was in the bias before.
    assert torch.allclose(model(x), expected, atol=0.05 if inputs else 1e-4)


def test_a_channel_that_is_multiplied_by_zero(x):
    model, site = folded(x)
    with torch.no_grad():
        site.layer.folded_norm.weight[1] = 0.0
    bw.calibrate(model, [x])
    expected = model(x)
    for quantizer in quantizers(model).values():
        if quantizer is not site.quantizer:
            quantizer.off()
    helper.quant_weight_inplace(model)
    assert bool(torch.isfinite(site.layer.weight).all())
    assert torch.allclose(model(x)[:, 1], expected[:, 1], atol=0.05)
