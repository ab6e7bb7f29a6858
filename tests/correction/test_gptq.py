"""GPTQ against the written-out elimination, weight by weight, and Gram matrices against the layers themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.correction.gptq import round_weight
from bitwright.correction.grams import Gram
from bitwright.errors import ConfigError
from bitwright.nn.weight_sites import weight_sites
from tests.correction.nets import calibrated, data, trained

LAYERS = {
    "linear": lambda: nn.Linear(12, 5),
    "conv": lambda: nn.Conv2d(3, 4, 3, padding=1, stride=2),
    "dilated": lambda: nn.Conv2d(3, 4, (3, 2), dilation=(1, 2), padding=(2, 0)),
    "same": lambda: nn.Conv2d(3, 4, (2, 3), padding="same"),
    "grouped": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1),
    "1d": lambda: nn.Conv1d(3, 4, 3, stride=2),
    "3d": lambda: nn.Conv3d(2, 4, 2),
}


def made(name):
    torch.manual_seed(4)
    return LAYERS[name]()


def example(layer):
    torch.manual_seed(3)
    if isinstance(layer, nn.Linear):
        return torch.randn(40, 12).relu() + torch.randn(40, 1).abs()
    return (torch.randn(4, layer.in_channels, *[7] * (layer.weight.ndim - 2)) + 0.5).relu()


@pytest.mark.parametrize("name", LAYERS)
def test_gram_matrices_tell_the_error_of_the_result(name):
    layer = made(name)
    x, gram = example(layer), Gram(layer)
    gram.add(x[:2])
    gram.add(x[2:])
    difference = torch.randn_like(layer.weight)
    if isinstance(layer, nn.Linear):
        wanted = F.linear(x, difference).square().sum(0)
    else:
        conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
        result = conv(x, difference, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        wanted = result.square().transpose(0, 1).flatten(1).sum(1)
    assert torch.allclose(gram.error(gram.matrix(difference)).flatten().float(), wanted, rtol=1e-4)


def written_out(row, gram, scale, low, high, damping, act_order):
    """Round one weight after the other; all others take its error, by the inverse matrix of those that are left."""
    gram = gram.clone()
    diagonal = gram.diagonal().clone()
    gram += torch.diag(torch.where(diagonal > 0, damping * diagonal.mean(), diagonal.mean()))
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(len(row))
    row, inverse = row[order].clone(), torch.linalg.inv(gram[order][:, order])
    scale, rounded = scale[order], torch.zeros_like(row)
    for j in range(len(row)):
        rounded[j] = (row[j] / scale[j]).round().clamp(low, high) * scale[j]
        row = row - (row[j] - rounded[j]) / inverse[j, j] * inverse[j]
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return torch.zeros_like(row).scatter(0, order, rounded)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("spec", ["int3 symmetric channel:0", "int3 symmetric tensor", "int3 symmetric group:4:1"])
@pytest.mark.parametrize("name", LAYERS)
def test_rounding_is_that_of_the_written_out_elimination(name, spec, act_order):
    layer = made(name)
    if "group:" in spec and name != "linear":
        pytest.skip("groups are for linear layers here")
    quantizer = bw.TensorQuantizer(spec)
    quantizer.observe()
    weight = layer.weight.detach()
    quantizer(weight)
    quantizer.compute_qparams()
    gram = Gram(layer)
    gram.add(example(layer))
    found, share = round_weight(weight, quantizer, gram, 0.01, act_order)
    scale = quantizer.scale
    scale = scale.repeat_interleave(4, 1) if scale.ndim > 1 else scale.reshape(-1, *[1] * (weight.ndim - 1))
    rows, scales = gram.matrix(weight).double(), gram.matrix(scale.expand_as(weight)).double()
    total = [0.0, 0.0]
    for g in range(len(rows)):
        for r in range(rows.shape[1]):
            best = written_out(rows[g, r], gram.total[g], scales[g, r], -4, 3, 0.01, act_order)
            plain = (rows[g, r] / scales[g, r]).round().clamp(-4, 3) * scales[g, r]
            errors = [float((d := each - rows[g, r]) @ gram.total[g] @ d) for each in (plain, best)]
            wanted = best if errors[1] < errors[0] else plain
            assert torch.allclose(gram.matrix(found)[g, r].double(), wanted, atol=1e-6)
            total = [total[0] + errors[0], total[1] + min(errors)]
    assert share == pytest.approx(total[1] / total[0], rel=1e-3)
    assert share <= 1.0


def test_weights_lie_on_the_grid_and_results_improve():
    model = calibrated(trained(), 3)
    done = bw.gptq(model, iter(data()))  # also what can be read only once
    assert set(done.changed) == {"stem.0", "deep.0", "wide.0", "side", "fc"}
    assert all(0 < share <= 1.0 for share in done.changed.values())
    assert min(done.changed.values()) < 0.75
    for site in weight_sites(model):
        weight = site.weight()
        assert torch.allclose(site.quantizer.fake_quantize(weight), weight, atol=1e-5)
    at_once = bw.gptq(calibrated(trained(), 3), data(), passes=1)
    assert set(at_once.changed) == set(done.changed)
    with pytest.raises(ConfigError, match="passes must be a whole number of at least 1, not 0"):
        bw.gptq(model, data(), passes=0)
    assert at_once.changed["stem.0"] == pytest.approx(done.changed["stem.0"])


def test_inputs_that_are_always_zero_or_dependent():
    layer = nn.Linear(6, 3)
    x = torch.randn(20, 1).expand(-1, 6).clone()
    x[:, 2] = 0.0
    gram, quantizer = Gram(layer), bw.TensorQuantizer("int3 symmetric channel:0")
    gram.add(x)
    quantizer.set_qparams(torch.full((3,), 0.1))
    found, _ = round_weight(layer.weight.detach(), quantizer, gram, 1e-9, True)
    nearest = quantizer.fake_quantize(layer.weight.detach())
    assert torch.allclose(found[:, 2], nearest[:, 2], atol=1e-6)
    gram.total[0, 0, 0] = float("nan")
    with pytest.raises(ConfigError, match="hold NaN or infinity"):
        round_weight(layer.weight.detach(), quantizer, gram, 0.01, True)


def test_what_is_left_alone():
    net = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 2), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).eval()
    rules = [{"match": "2", "weight": {"method": "apot"}}, {"match": "0", "weight": "int4 symmetric channel:1"}]
    model = calibrated(net, rules=rules)
    done = bw.gptq(model, data())
    assert set(done.changed) == {"4"}
    assert done.skipped["0"] == "a QuantConvTranspose2d is not a linear layer or convolution"
    assert done.skipped["2"] == "apot has no uniform grid of integers"
    with pytest.raises(ConfigError, match="damping must be above 0, not 0"):
        bw.gptq(model, data(), damping=0)
