"""train and its parts."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import CalibrationError, ConfigError
from bitwright.nn.weight_sites import weight_sites
from bitwright.quantizer import quantizers
from bitwright.training import (
    Distillation,
    Oscillations,
    WeightAverage,
    change_bits,
    freeze_ranges,
    qat_parameters,
    qat_recipe,
    unfreeze_ranges,
)
from tests.reconstruction.nets import calibrated

WORDS = ["lsq", "lsq+", "pact", "dorefa", "dsq", "tqt", "apot"]


def labelled(batches):
    return [(x, x.mean((2, 3)).argmax(1)) for (x,) in batches]


def trained(word="lsq", preset="W4A4", epochs=6, **options):
    model, batches = calibrated("residual", qat_recipe(word, preset))
    data = labelled(batches)
    return model, data, bw.train(model, data, F.cross_entropy, epochs=epochs, **{"lr": 0.02, **options})


@pytest.mark.parametrize("word", WORDS)
def test_every_method_learns_by_one_word(word):
    model, _, result = trained(word)
    assert result.epochs[-1].loss < result.epochs[0].loss
    names = {type(q.method).__name__.lower().removesuffix("fakequantize") for q in quantizers(model).values()}
    wanted = {"lsq": "learnable", "lsq+": "lsqplus", "pact": "pact"}.get(word, word)
    assert wanted in names
    assert not model.training
    assert str(result).count("\n") == 6


@pytest.mark.parametrize("preset", ["W4A4", "W3A3", "W2A2"])
def test_first_and_last_layers_keep_eight_bits(preset):
    model, _ = calibrated("residual", qat_recipe("lsq", preset))
    bits = {site.name: site.quantizer.spec.bits for site in weight_sites(model)}
    assert (bits["0"], bits["6"], bits["2.conv1"]) == (8, 8, int(preset[1]))


@pytest.mark.parametrize(("word", "method"), [("dorefa", "DoReFa"), ("pact", "DoReFa"), ("apot", "APoT")])
def test_methods_for_few_bits_leave_first_and_last_layers_to_lsq(word, method):
    model, _ = calibrated("residual", qat_recipe(word, "W4A4"))
    methods = {site.name: site.quantizer.method_name.removesuffix("FakeQuantize") for site in weight_sites(model)}
    assert (methods["0"], methods["6"], methods["2.conv1"]) == ("Learnable", "Learnable", method)


def test_unknown_words_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'lsq"):
        qat_recipe("lsqq")
    with pytest.raises(ConfigError, match="unknown preset 'W5A9'"):
        qat_recipe("lsq", "W5A9")


def test_scales_have_a_rate_of_their_own_and_no_decay():
    model, _ = calibrated("residual", qat_recipe("lsq"))
    groups = {group["name"]: group for group in qat_parameters(model, lr=0.1, quantizer_lr=0.01, weight_decay=1e-3)}
    assert (groups["model"]["lr"], groups["model"]["weight_decay"]) == (0.1, 1e-3)
    assert (groups["quantizers"]["lr"], groups["quantizers"]["weight_decay"]) == (0.01, 0.0)


def test_frozen_ranges_stay():
    model, data = trained(epochs=1)[:2]
    freeze_ranges(model)
    before = [float(q.qparams()[0].sum()) for q in quantizers(model).values()]
    weight = next(model.parameters()).detach().clone()
    bw.train(model, data, F.cross_entropy, lr=0.05)
    assert [float(q.qparams()[0].sum()) for q in quantizers(model).values()] == before
    assert not torch.equal(next(model.parameters()), weight)
    unfreeze_ranges(model)
    bw.train(model, data, F.cross_entropy, lr=0.05)
    assert [float(q.qparams()[0].sum()) for q in quantizers(model).values()] != before


def test_norms_and_ranges_freeze_by_epoch():
    model, _, _ = trained(epochs=2, batch_statistics=True, freeze_norms_after=1, freeze_ranges_after=1)
    norm = model.get_submodule("2.bn1")
    moved = norm.running_mean.clone()
    model.train()(torch.randn(4, 3, 8, 8))
    assert torch.equal(norm.running_mean, moved)
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".method." in n)


def test_distillation_is_the_divergence_from_the_float_model():
    model, batches = calibrated("residual", qat_recipe("lsq"))
    x = batches[0][0]
    teach = Distillation(model, temperature=2.0)
    logits = torch.randn(16, 5, dtype=torch.float64, requires_grad=True)
    wanted = teach.teacher(x).double()
    p, q = (wanted / 2).softmax(1), (logits / 2).softmax(1)
    expected = 4 * (p * (p.log() - q.log())).sum(1).mean()
    assert float(teach(logits, x)) == pytest.approx(float(expected), rel=1e-5)
    assert torch.autograd.gradcheck(lambda z: teach(z, x), logits, atol=1e-4)
    assert float(teach(wanted, x)) == pytest.approx(0.0, abs=1e-6)
    _, _, result = trained(distill=1.0)
    assert result.epochs[-1].loss < result.epochs[0].loss


def test_the_average_is_between_what_was_seen():
    model = torch.nn.Linear(2, 2)
    average = WeightAverage(model, 0.5)
    begin = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update()  # of the first steps the last counts 10 / 11
    with average.applied():
        assert torch.allclose(model.weight, begin + 10 / 11)
    assert torch.allclose(model.weight, begin + 1.0)
    average.apply()
    assert torch.allclose(model.weight, begin + 10 / 11)
    assert trained(average=0.9)[2].epochs


def test_an_oscillating_weight_is_frozen_where_it_was_most():
    model, _ = calibrated("residual", qat_recipe("lsq"))
    site = next(s for s in weight_sites(model) if s.name == "2.conv1")
    scale = site.quantizer.qparams()[0].detach()[0]
    watch = Oscillations(model, threshold=0.4, momentum=0.1)
    for i in range(90):  # first still, then two steps of three at the integer 1 and one at 2
        with torch.no_grad():
            site.layer.weight[0, 0, 0, 0] = scale * (1.9 if i >= 60 and i % 3 == 2 else 1.1)
        watch.step()
        assert i >= 60 or watch.frozen == 0.0
    assert 0.0 < watch.frozen < 0.01
    assert float(site.weight()[0, 0, 0, 0]) == pytest.approx(float(scale), rel=1e-5)


def test_dampening_is_the_distance_to_the_grid():
    model, _ = calibrated("residual", qat_recipe("lsq"))
    watch = Oscillations(model)
    expected = 0.0
    for site in weight_sites(model):
        if site.quantizer.spec.bits <= 4:
            w, spec = site.weight().detach(), site.quantizer.spec
            s = site.quantizer.qparams()[0].detach().reshape(-1, 1, 1, 1)
            q = (w / s).round().clamp(spec.qmin, spec.qmax)
            expected += float((q * s - w.clamp(spec.qmin * s, spec.qmax * s)).square().sum())
    assert float(watch.dampening()) == pytest.approx(expected, rel=1e-4)
    weight = model.get_submodule("2.conv1").weight
    (grad,) = torch.autograd.grad(watch.dampening(), weight)
    step = 1e-3 * float(weight.abs().max())
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            weight[0, 0, 0, 0] += sign * step
            values.append(float(watch.dampening()))
            weight[0, 0, 0, 0] -= sign * step
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(float(grad[0, 0, 0, 0]), rel=0.1, abs=1e-3)
    assert trained(dampening=1e-3, freeze_threshold=0.05)[2].epochs
    with pytest.raises(ConfigError, match="must be above the momentum"):
        Oscillations(model, threshold=0.001)


def test_bits_fall_epoch_by_epoch():
    model, _, result = trained(epochs=3, bits={0: (6, 6), 2: (4, 4)})
    bits = {site.name: site.quantizer.spec.bits for site in weight_sites(model)}
    assert (bits["0"], bits["2.conv1"]) == (8, 4)
    assert len(result.epochs) == 3
    with pytest.raises(ConfigError, match="from 2 to 16, not 1"):
        change_bits(model, 1)


def test_what_cannot_be_trained_is_refused():
    model, batches = calibrated("residual", qat_recipe("lsq"))
    data = labelled(batches)
    unheard = {"teacher": torch.nn.Identity()}
    for options, words in (({"epochs": 0}, "at least 1"), ({"distill": 2.0}, "from 0 to 1"), (unheard, "distill=0.5")):
        with pytest.raises(ConfigError, match=words):
            bw.train(model, data, F.cross_entropy, **options)
    with pytest.raises(CalibrationError, match="empty"):
        bw.train(model, [], F.cross_entropy)
    with pytest.raises(ConfigError, match="inputs and the target"):
        bw.train(model, [torch.randn(4, 3, 8, 8)], F.cross_entropy)
    with pytest.raises(CalibrationError, match="lower lr"):
        bw.train(copy.deepcopy(model), data, lambda p, _: p.sum() * float("nan"))
    other, batches = calibrated("residual")
    bw.reconstruct(other, batches, steps=30, lr=0.1)
    with pytest.raises(ConfigError, match="train first"):
        bw.train(other, data, F.cross_entropy)


def statistics_of(model):
    return [v.clone() for n, v in model.state_dict().items() if "running_" in n]


def test_norms_get_the_statistics_of_the_trained_weights():
    """As a written-out pass: with all layers before it done, each norm has the mean over batches of the batch's own."""
    model, data, _ = trained(epochs=1, lr=0.1, batch_statistics=True)
    norm, seen = model.get_submodule("2.bn1"), []
    hook = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].double().mean((0, 2, 3))))
    with torch.no_grad():
        for x, _ in data:
            model(x)
    hook.remove()
    assert torch.allclose(norm.running_mean.double(), torch.stack(seen).mean(0), atol=1e-5)
    lagging, _, _ = trained(epochs=1, lr=0.1, batch_statistics=True, freeze_norms_after=0)
    assert not torch.allclose(norm.running_mean, lagging.get_submodule("2.bn1").running_mean, atol=1e-3)


class Pair(nn.Module):
    """Two inputs; results by name, or the logits alone."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.named = nn.Linear(4, 6), nn.Linear(3, 6), False

    def forward(self, x, y):
        logits = torch.relu(self.one(x)) + self.two(y)
        return {"logits": logits} if self.named else logits


@pytest.mark.parametrize("form", ["flat", "tuple", "dict"])
def test_several_inputs_may_have_a_tuple_or_dict_of_their_own(form):
    torch.manual_seed(0)
    net, x, y, labels = Pair(), torch.randn(8, 4), torch.randn(8, 3), torch.arange(8) % 6
    given = {"flat": (x, y), "tuple": ((x, y),), "dict": ({"x": x, "y": y},)}[form]
    model = bw.calibrate(bw.prepare(net, (x, y), recipe=qat_recipe("lsq", "W4A8")), [(x, y)])
    settings = {"epochs": 3, "lr": 0.1, "distill": 0.1, "batch_statistics": True}
    losses = [e.loss for e in bw.train(model, [(*given, labels)], F.cross_entropy, **settings).epochs]
    assert losses[-1] < losses[0]
    net.named = True
    model = bw.calibrate(bw.prepare(net, (x, y), recipe=qat_recipe("lsq", "W4A8")), [(x, y)])
    with pytest.raises(ConfigError, match="the model returns a dict and the teacher a dict"):
        bw.train(model, [(*given, labels)], lambda made, to: F.cross_entropy(made["logits"], to), distill=0.5)


def test_a_loader_that_is_read_once_is_refused_for_more_epochs():
    model, batches = calibrated("residual", qat_recipe("lsq", "W4A4"))
    with pytest.raises(ConfigError, match="a list_iterator can be read only once, not for 2 epochs"):
        bw.train(model, iter(labelled(batches)), F.cross_entropy, epochs=2)


def test_a_loader_that_is_read_once_leaves_the_statistics_of_training():
    model, batches = calibrated("residual", qat_recipe("lsq"))
    before = statistics_of(model)
    bw.train(model, iter(labelled(batches)), F.cross_entropy, lr=0.02, batch_statistics=True)
    assert not all(torch.equal(a, b) for a, b in zip(statistics_of(model), before, strict=True))


def test_weights_without_a_size_are_not_trained_with_folded_norms():
    assert qat_recipe("pact", "W4A8").weight.method == "LearnableFakeQuantize"
    assert qat_recipe("pact", "W4A4").weight.method == "DoReFaFakeQuantize"
    assert qat_recipe("dorefa", "W4A8", backend="academic").weight.method == "DoReFaFakeQuantize"
    with pytest.raises(ConfigError, match=r"onnxruntime .*W4A4, or the word 'pact'"):
        qat_recipe("dorefa", "W4A8")
    weight = {"method": "DoReFaFakeQuantize", "method_options": {"normalize": True}}
    model, batches = calibrated("residual", {"preset": "W4A8", "weight": weight})
    with pytest.raises(ConfigError, match=r"2\.conv1: the weights of DoReFaFakeQuantize have one size"):
        bw.train(model, labelled(batches), F.cross_entropy, batch_statistics=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr must be a finite number of at least 0, not -1.0"),
        ({"weight_decay": float("nan")}, "weight_decay must be a finite number of at least 0, not nan"),
        ({"dampening": -1}, "dampening must be a finite number of at least 0, not -1"),
        ({"bits": {0: 3}}, "such as {0: (6, 6)}, not {0: 3}"),
        ({"bits": {1: (3, 3)}}, "from epochs below 1 to the bits"),
        ({"bits": (3, 3)}, "not (3, 3)"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(options, words):
    model, batches = calibrated("residual")
    with pytest.raises(ConfigError, match=re.escape(words)):
        bw.train(model, [(*batches[0], torch.zeros(16, dtype=torch.long))], F.cross_entropy, **options)
