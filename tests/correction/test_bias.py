"""Corrected biases: results have the means that they have in float, layer by layer."""

import copy

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.correction.reference import Original
from bitwright.correction.running import outputs_apart
from tests.correction.nets import calibrated, data, trained

LAYERS = ("stem.0", "deep.0", "wide.0", "side", "fc")
HOLDERS = {"stem.0": "stem.1", "deep.0": "deep.1"}  # who has the bias where the layer has none


def means(model, name, run):
    """The mean of each channel of one layer's result."""
    seen = []
    hook = model.get_submodule(name).register_forward_hook(lambda _m, _a, y: seen.append(y))
    with torch.no_grad():
        run()
    hook.remove()
    return seen[0].transpose(0, 1).flatten(1).mean(1)


def test_layers_are_corrected_in_order():
    batch, model = data(1)[0], calibrated(trained(), 3)
    written_out, original = copy.deepcopy(model), copy.deepcopy(model)
    inputs = bw.ledger_of(model).example
    keeper = Original(original)
    for name in LAYERS:  # one whole pass for each layer, with all before it corrected
        wanted = means(original, name, lambda: keeper.run(original, inputs))
        shift = means(written_out, name, lambda: written_out(batch)) - wanted
        layer, holder = (written_out.get_submodule(n) for n in (name, HOLDERS.get(name, name)))
        with torch.no_grad():
            factor = 1.0
            if name == "wide.0":
                norm = written_out.get_submodule("wide.1")
                factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            assert layer.weight_quantizer.quantizes
            holder.bias -= shift / factor
    done = bw.correct_bias(model, [batch])
    assert set(done.changed) == set(LAYERS)
    assert not done.skipped
    for name in LAYERS:
        holder = HOLDERS.get(name, name)
        found, wanted = (m.get_submodule(holder).bias for m in (model, written_out))
        assert torch.allclose(found, wanted, atol=2e-3), name  # a value on the border of a step may fall elsewhere


def test_the_error_goes_down_and_a_second_time_changes_little():
    model = calibrated(trained(), 3)
    original = Original(model)
    before = outputs_apart(model, original, data())
    first = bw.correct_bias(model, data())
    after = outputs_apart(model, original, data())
    assert after < before
    second = bw.correct_bias(model, data())
    assert max(second.changed.values()) < 0.2 * max(first.changed.values())


def test_the_target_is_the_model_before_any_corrector():
    model = calibrated(trained(), 3)
    original, errors = Original(model), []
    for step in (bw.gptq, bw.reestimate_norms, bw.correct_bias):
        step(model, data())
        errors.append(outputs_apart(model, original, data()))
    assert errors[2] <= errors[1] <= errors[0]
    with torch.no_grad():  # as training does: this is the new original
        model.fc.bias += 3.0
    bw.correct_bias(model, data())
    with torch.no_grad():
        assert float((model(data()[0]) - original.run(model, bw.ledger_of(model).example)).mean()) > 2.0


def test_where_there_is_no_bias():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False))
    model = calibrated(trained_without_affine(net), 2)
    mean = model[3].running_mean.clone()
    done = bw.correct_bias(model, data())
    assert done.skipped == {"0": "it has no bias, and no BatchNorm after it"}
    assert torch.equal(model[3].running_mean, mean)  # the layer has a bias itself
    assert "2" in done.changed
    assert "1 layer changed, 1 left alone" in str(done)


@pytest.mark.parametrize("affine", [True, False])
def test_the_norm_takes_the_bias_of_a_layer_that_has_none(affine):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=affine))
    model = calibrated(trained_without_affine(net), 2)
    original = Original(model)
    wanted, before = original.run(model, bw.ledger_of(model).example), model(data()[0])
    bw.correct_bias(model, data(1))
    found = model(data()[0])
    apart = [(y - wanted).mean((0, 2, 3)).abs().max() for y in (before, found)]
    assert apart[1] < 0.2 * apart[0]


def trained_without_affine(net):
    with torch.no_grad():
        for _ in range(3):
            net.train()(data(1)[0])
    return net.eval()
