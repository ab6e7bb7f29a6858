"""Weight ranges by output error, correctors by recipe, and the deployed file of a corrected model."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.correction.grams import at_once
from bitwright.correction.reference import Original
from bitwright.correction.running import outputs_apart
from bitwright.errors import ConfigError, UnknownNameError
from tests.correction.nets import calibrated, data, trained


def test_ranges_have_the_least_error_of_the_result():
    model = calibrated(trained(), 3)
    layer = model.wide[0]
    gram = dict(at_once(model, [layer], data(), None))[layer]
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


def test_calibration_says_what_it_leaves_to_correct(caplog):
    model = bw.prepare(trained(), data()[0], recipe="W4A4")
    bw.calibrate(model, data())
    said = "the recipe asks for corrections (gptq, norms, bias): bw.correct(model, batches) applies them"
    assert said in caplog.messages
    assert said in bw.ledger_of(model).notes
    bw.correct(model, data())
    assert said not in bw.ledger_of(model).notes


def test_a_recipe_names_the_steps():
    recipe = {"preset": "W4A8", "correct": ["weight_ranges", "norms", "bias"]}
    model = bw.calibrate(bw.prepare(trained(), data()[0], recipe=recipe), data())
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
    model = bw.calibrate(bw.prepare(trained(), data()[0], recipe="W4A8"), data())
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
    model = bw.calibrate(bw.prepare(net, x, recipe="W4A8"), [x])
    with torch.no_grad():
        wanted = net(x)
        before = (model(x) - wanted).mean(0).square().sum()
        bw.correct(model, [x], steps)
        assert torch.equal(Original(model).state["one.weight"], Original(model).state["two.weight"])
        after = (model(x) - wanted).mean(0).square().sum()
    assert after <= before * (1e-3 if "bias" in steps else 1)
