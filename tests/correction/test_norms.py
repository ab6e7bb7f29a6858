"""Re-estimated BatchNorms: the statistics of the quantized model, whether they are folded or not."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.correction.reference import Original
from bitwright.correction.running import outputs_apart
from bitwright.errors import CalibrationError
from bitwright.nn.weight_sites import weight_sites
from tests.correction.nets import Net, calibrated, data, trained


def results(model, run, layers):
    """The results of layers while ``run`` runs."""
    seen = {}
    hooks = [layer.register_forward_hook(lambda m, _, y: seen.__setitem__(m, y)) for layer in layers]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return [seen[layer] for layer in layers]


def test_statistics_of_one_batch_are_stored_as_they_are():
    batch = data(1)[0]
    model = calibrated(trained(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))), 2, [batch])
    conv, norm = model[0], model[1]
    weight = conv.weight_quantizer(conv.folded_weight()[0]).detach()
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    seen = {}
    conv.register_forward_pre_hook(lambda _, args: seen.__setitem__("x", args[0]))
    model(batch)
    before = torch.nn.functional.conv2d(seen["x"], weight / factor.view(-1, 1, 1, 1)).detach()
    bw.reestimate_norms(model, [batch], against_float=False)
    assert torch.allclose(norm.running_mean, before.mean((0, 2, 3)), atol=1e-4)
    assert torch.allclose(norm.running_var, before.var((0, 2, 3)), rtol=1e-3)
    found = model(batch).detach()
    assert torch.allclose(found.mean((0, 2, 3)), norm.bias, atol=0.05)  # the result has steps of its own
    assert torch.allclose(found.std((0, 2, 3)), norm.weight, rtol=0.05)


def test_results_have_the_mean_and_variance_of_float():
    batches = data(1, 64)
    model = calibrated(trained(), 2, batches)
    layers = [model.stem[0], model.deep[0], model.wide[0], model.norm]
    original = Original(model)
    wanted = results(model, lambda: original.run(model, bw.ledger_of(model).example), layers)
    moved = results(model, lambda: model(batches[0]), layers)
    done = bw.reestimate_norms(model, batches)
    found = results(model, lambda: model(batches[0]), layers)
    assert set(done.changed) == {"stem.0", "deep.0", "wide.0", "norm"}
    assert done.skipped == {"side": "no BatchNorm is folded into it", "fc": "no BatchNorm is folded into it"}
    for y, before, target in zip(found, moved, wanted, strict=True):
        for moment in (torch.mean, torch.std):
            apart, was = ((moment(v, (0, 2, 3)) - moment(target, (0, 2, 3))).abs().max() for v in (y, before))
            assert apart < 0.25 * was


def test_integers_stay_as_they_are():
    model = calibrated(trained(), 3)
    before = [site.quantizer.integers(site.weight()) for site in weight_sites(model)]
    bw.reestimate_norms(model, data())
    after = [site.quantizer.integers(site.weight()) for site in weight_sites(model)]
    assert all((a != b).float().mean() < 0.01 for a, b in zip(after, before, strict=True))


def test_means_alone_are_corrected_where_all_channels_share_a_scale():
    model = calibrated(trained(), weight={"spec": "int4 symmetric tensor"})
    stem = model.stem[0].weight_quantizer.scale.clone(), model.stem[1].running_var.clone()
    original = Original(model)
    before = outputs_apart(model, original, data())
    bw.reestimate_norms(model, data())
    assert torch.equal(model.stem[0].weight_quantizer.scale, stem[0])
    assert torch.allclose(model.stem[1].running_var, stem[1])
    assert outputs_apart(model, original, data()) < before


def test_nothing_changes_where_rounding_does_not():
    model = calibrated(trained(), weight={"spec": "int16 symmetric channel:0"}, activation="int16")
    before = {k: v.clone() for k, v in bw.float_state_dict(model).items()}
    bw.reestimate_norms(model, data())
    for name, value in bw.float_state_dict(model).items():
        assert torch.allclose(value.float(), before[name].float(), atol=1e-3)


def test_a_channel_that_is_multiplied_by_zero_stays():
    net = trained()
    with torch.no_grad():
        net.stem[1].weight[2] = 0.0
    model = calibrated(net)
    before = model.stem[1].running_mean[2].clone(), model.stem[1].running_var[2].clone()
    bw.reestimate_norms(model, data())
    assert (model.stem[1].running_mean[2], model.stem[1].running_var[2]) == before
    assert model(data()[0]).isfinite().all()


def test_shuffled_channels_reach_their_norm():
    class Shuffled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)

        def forward(self, x):
            y = self.conv(x)
            n, c, h, w = y.shape
            return self.norm(y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))

    model = calibrated(trained(Shuffled()), 2, data(1))
    original = Original(model)
    before = outputs_apart(model, original, data(1))
    bw.reestimate_norms(model, data(1))
    assert outputs_apart(model, original, data(1)) < before


def test_refusals():
    net = Net().eval()
    prepared = bw.prepare(net, data()[0])
    with pytest.raises(CalibrationError, match="no layer of the model quantizes its weight: calibrate it first"):
        bw.reestimate_norms(prepared, data())
    model = calibrated(trained())
    with pytest.raises(CalibrationError, match="the data is empty"):
        bw.reestimate_norms(model, iter([]))
    flat = calibrated(trained(nn.Sequential(nn.Conv2d(3, 4, 10), nn.BatchNorm2d(4))))
    with pytest.raises(CalibrationError, match="only one value per channel of a BatchNorm: use larger batches"):
        bw.reestimate_norms(flat, data(1, 1))
