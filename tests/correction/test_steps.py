"""Weight ranges by output error, correctors by recipe, and the deployed file of a corrected model."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.correction.calibrate import _Kept
from bitwright.correction.grams import collected
from bitwright.correction.reference import Original
from bitwright.correction.running import outputs_apart
from bitwright.errors import ConfigError, UnknownNameError
from bitwright.training import Distillation
from tests.correction.nets import calibrated, data, trained

STEPS_OF_W4A4 = ["equalize", "gptq", "reestimate_norms", "correct_bias"]


def test_ranges_have_the_least_error_of_the_result():
    model = calibrated(trained(), 3)
    layer = model.wide[0]
    gram = dict(collected(model, [layer], data(), None))[layer]
    weight = layer.folded_weight()[0].detach()
    least = torch.full((8,), torch.inf, dtype=torch.float64)
    for part in torch.linspace(1, 0.5, 11):
        scale = (weight.abs().flatten(1).amax(1) * part / 3).reshape(-1, 1, 1, 1)
        rounded = (weight / scale).round().clamp(-3, 3) * scale
        least = torch.minimum(least, gram.error(gram.matrix(rounded - weight)).flatten())
    done = bw.fit_weight_ranges(model, data(), least=0.5, candidates=11)
    found = gram.error(gram.matrix(layer.weight_quantizer.fake_quantize(weight) - weight)).flatten()
    assert torch.allclose(found, least, rtol=1e-5)
    assert set(done.changed) == {"stem.0", "deep.0", "wide.0", "side", "fc"}
    assert all(share <= 1.0 for share in done.changed.values())
    assert min(done.changed.values()) < 0.9
    again = bw.fit_weight_ranges(model, data(), least=0.5, candidates=11)
    assert again.changed["stem.0"] == pytest.approx(1.0)


@pytest.mark.parametrize("spec", ["int3 symmetric tensor", "uint3 affine channel:0", "int2 symmetric pot channel:0"])
def test_ranges_of_other_specs(spec):
    model = calibrated(trained(), weight=spec)
    done = bw.fit_weight_ranges(model, data())
    assert max(done.changed.values()) <= 1.0
    assert min(done.changed.values()) < 1.0
    assert model(data()[0]).isfinite().all()
    with pytest.raises(ConfigError, match="least must be above 0 and at most 1"):
        bw.fit_weight_ranges(model, data(), least=0)


def test_groups_have_no_range_of_an_output_channel():
    rules = [{"match": "fc", "weight": "int4 symmetric group:4:1"}]
    done = bw.fit_weight_ranges(calibrated(trained(), rules=rules), data())
    assert "group:4" in done.skipped["fc"]


def test_a_tensor_is_one_batch_and_a_name_one_step():
    first, second = calibrated(trained(), 3), calibrated(trained(), 3)
    x = torch.cat(data())
    bw.correct(first, [x], ["gptq", "bias"])
    bw.correct(second, x, "gptq")
    bw.correct(second, x, "bias")
    assert torch.equal(first(x), second(x))
    third = calibrated(trained(), 3)
    bw.correct(third, x, ["gptq", "bias"])
    assert torch.equal(first(x), third(x))


def test_calibration_corrects_by_recipe(caplog):
    model = bw.calibrate(bw.prepare(trained(), data()[0], recipe="W4A4"), data())
    plain = bw.calibrate(bw.prepare(trained(), data()[0], recipe="W4A4"), data(), correct=False)
    said = "the recipe asks for corrections (equalize, gptq, norms, bias): bw.correct(model, batches) applies them"
    assert caplog.messages == [said]
    assert said in bw.ledger_of(plain).notes
    assert [line.split(":")[0] for line in bw.ledger_of(model).corrected] == STEPS_OF_W4A4
    assert bw.ledger_of(plain).corrected == []
    original = Original(plain)
    apart = outputs_apart(plain, original, data())
    bw.correct(plain, data())
    assert bw.ledger_of(plain).notes == bw.ledger_of(model).notes
    assert bw.ledger_of(plain).corrected == bw.ledger_of(model).corrected
    x = data()[0]
    assert torch.equal(plain(x), model(x))
    assert outputs_apart(plain, original, data()) < apart
    none = bw.calibrate(bw.prepare(trained(), x, recipe={"preset": "W4A4", "correct": []}), data())
    assert bw.ledger_of(none).corrected == []


def test_calibration_reads_data_once_and_starts_anew():
    model = bw.prepare(trained(), data()[0], recipe={"preset": "W4A8", "correct": ["gptq", "norms", "bias"]})
    first = bw.calibrate(model, iter(data()))(data()[0])
    again = bw.calibrate(model, iter(data()))(data()[0])
    assert torch.equal(first, again)
    wide = [torch.full((200, 3, 10, 10), float(i)) for i in range(4)]
    seen = _Kept(wide, 512)
    assert len(list(seen)) == 4
    assert len(seen.first) == 3  # 512 samples are in three of them


def test_a_correction_that_does_not_fit_is_left_out(caplog):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    model = bw.prepare(net, torch.ones(1, 4), recipe="W4A8")
    bw.calibrate(model, [torch.randn(1, 4) for _ in range(3)])
    note = "the correction 'norms' of the recipe was left out: a batch has only one value per channel"
    assert any(line.startswith(note) for line in caplog.messages)
    assert any(line.startswith(note) for line in bw.ledger_of(model).notes)
    assert model(torch.ones(1, 4)).isfinite().all()


def test_corrections_leave_the_float_model_known():
    recipe = {"preset": "W4A8", "correct": ["gptq", "norms", "bias"]}
    model = bw.calibrate(bw.prepare(trained(), data()[0], recipe=recipe), data())
    plain = bw.calibrate(bw.prepare(trained(), data()[0], recipe=recipe), data(), correct=False)
    assert bw.sensitivity(model, data()).layers == bw.sensitivity(plain, data()).layers
    x = data()[0]
    teacher, wanted = Distillation(model).teacher(x), Distillation(plain).teacher(x)
    assert torch.allclose(teacher, wanted, atol=1e-5)
    rows = {row.name: row for row in bw.analyze(model, data())}
    assert 5 < rows["fc"].weight.sqnr < 40  # dB: not that of a weight which lies on its grid


def test_other_bits_undo_corrections():
    recipe = {"backend": "virtual", "weight": "int4 symmetric channel:0", "correct": ["gptq", "norms", "bias"]}
    model = bw.calibrate(bw.prepare(trained(), data()[0], recipe=recipe), data())
    plain = bw.calibrate(bw.prepare(trained(), data()[0], recipe=recipe), data(), correct=False)
    budget = {"size": 1e6}
    found, wanted = (bw.search_bits(each, data(), budget, bits=(4, 8)) for each in (model, plain))
    assert found.bits == wanted.bits
    assert found.measured == pytest.approx(wanted.measured)
    assert bw.ledger_of(model).corrected == []
    assert any("corrections were undone" in note for note in bw.ledger_of(model).notes)
    assert torch.allclose(model(data()[0]), plain(data()[0]), atol=1e-5)


def test_a_recipe_names_the_steps():
    recipe = {"preset": "W4A8", "correct": ["weight_ranges", "norms", "bias"]}
    model = bw.calibrate(bw.prepare(trained(), data()[0], recipe=recipe), data(), correct=False)
    original = Original(model)
    before = outputs_apart(model, original, data())
    done = bw.correct(model, iter(data()))
    assert [each.step for each in done] == ["fit_weight_ranges", "reestimate_norms", "correct_bias"]
    assert outputs_apart(model, original, data()) < before
    assert bw.Recipe.parse(bw.ledger_of(model).recipe.to_dict()).correct == ("weight_ranges", "norms", "bias")
    with pytest.raises(ConfigError, match="correct"):
        bw.Recipe.parse({"correct": ["magic"]})
    with pytest.raises(UnknownNameError, match="unknown corrector 'norm': did you mean 'norms'"):
        bw.correct(model, data(), ["norm"])


def test_the_file_of_a_corrected_model_is_proven(tmp_path):
    model = bw.calibrate(bw.prepare(trained(), data()[0], recipe="W4A8"), data(), correct=False)
    bw.correct(model, data(), ["weight_ranges", "gptq", "norms", "bias"])
    path = tmp_path / "model.onnx"
    bw.export(model, path)
    proof = bw.verify(model, path, data(1, 4), runtimes=["onnxruntime"], latency=False)
    assert proof.ok, str(proof)  # by the default limits: a gap of one step at most


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(torch.relu(self.two(torch.relu(self.one(x)))))


@pytest.mark.parametrize("steps", [("bias",), ("gptq", "norms", "bias"), ("smooth", "equalize", "weight_ranges")])
def test_layers_that_share_a_weight_are_corrected(steps):
    torch.manual_seed(0)
    net, x = Tied().eval(), torch.randn(64, 8)
    model = bw.calibrate(bw.prepare(net, x, recipe="W4A8"), [x], correct=False)
    with torch.no_grad():
        wanted = net(x)
        before = (model(x) - wanted).mean(0).square().sum()
        bw.correct(model, [x], steps)
        assert torch.equal(Original(model).state["one.weight"], Original(model).state["two.weight"])
        after = (model(x) - wanted).mean(0).square().sum()
    assert after <= before * (1e-3 if "bias" in steps else 1)


def test_samples_without_a_batch_dimension_are_corrected():
    torch.manual_seed(0)
    net, samples = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), list(torch.randn(8, 6))
    model = bw.calibrate(bw.prepare(net, samples[0], recipe="W4A8"), samples)
    batched = bw.calibrate(bw.prepare(net, torch.stack(samples), recipe="W4A8"), [torch.stack(samples)])
    assert [c.split(":")[0] for c in bw.ledger_of(model).corrected] == STEPS_OF_W4A4
    with torch.no_grad():
        assert torch.allclose(torch.stack([model(x) for x in samples]), batched(torch.stack(samples)), atol=1e-3)
