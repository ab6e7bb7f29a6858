"""reconstruct: errors fall or stay, and what was learned is what is deployed."""

import copy

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.correction.reference import Original
from bitwright.correction.running import outputs_apart
from bitwright.errors import CalibrationError, ConfigError
from bitwright.nn.weight_sites import weight_sites
from bitwright.quantizer import Mode, quantizers
from bitwright.reconstruction.columns import Column, Memory
from tests.reconstruction.nets import NETS, calibrated, residual_net

FEW = {"steps": 40, "batch_size": 8, "lr": 0.1}
MORE = {"steps": 300, "batch_size": 8, "lr": 0.02}


def run(name="residual", **options):
    model, batches = calibrated(name)
    return model, batches, bw.reconstruct(model, batches, **{**FEW, **options})


def weights(model):
    return {site.name: site.quantizer.integers(site.weight()).clone() for site in weight_sites(model)}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["adaround", "brecq", "qdrop"])
@pytest.mark.parametrize("name", NETS)
def test_the_error_of_every_unit_goes_down_or_stays(name, method):
    model, batches = calibrated(name)
    before = weights(model)
    result = bw.reconstruct(model, batches, method, **(MORE if name == "dense" else FEW))
    assert all(unit.after <= unit.before for unit in result.units)
    # Nets that are one large unit need more steps than these to gain something.
    assert name in ("kinds", "island", "outer") or any(unit.kept for unit in result.units)
    after = weights(model)
    assert max(int((after[n].int() - before[n].int()).abs().max()) for n in before) <= 1
    assert not any(p.requires_grad for n, p in model.named_parameters() if "rounding" in n)
    assert f"{len(result.units)} units" in str(result)


def test_an_island_gains_with_more_steps():
    _, _, result = run("island", method="adaround", steps=1000, lr=0.01)
    assert result.units[0].after < 0.8 * result.units[0].before


def test_the_reported_error_is_that_of_the_deployed_model():
    model, batches = calibrated("residual")
    result = bw.reconstruct(model, batches, "brecq", **FEW)
    gap = power = 0.0
    with torch.no_grad():
        for batch in batches:
            quantized = model(*batch)
            modes = {q: q.mode for q in quantizers(model).values()}
            for q in modes:
                q.mode = Mode.OFF
            exact = model(*batch)
            for q, mode in modes.items():
                q.mode = mode
            gap, power = gap + float((quantized - exact).square().sum()), power + float(exact.square().sum())
    assert result.units[-1].after == pytest.approx(gap / power, rel=1e-4)
    assert result.after == pytest.approx(gap / power, rel=1e-4)
    again, _ = calibrated("residual")
    assert result.before == pytest.approx(outputs_apart(again, Original(again), batches), rel=1e-4)
    assert f"{result.before:.2e} before, {result.after:.2e} after" in str(result)


def test_an_error_of_the_model_that_grew_is_told(monkeypatch):
    model, batches = calibrated("residual")
    found = iter((0.5, 0.6, 0.6, 0.5))
    monkeypatch.setattr("bitwright.reconstruction.run.outputs_apart", lambda *_: next(found))
    bw.reconstruct(model, batches, steps=1)
    assert "error grew from 0.5 to 0.6" in bw.ledger_of(model).notes[-1]
    notes = list(bw.ledger_of(model).notes)
    bw.reconstruct(model, batches, steps=1)
    assert bw.ledger_of(model).notes == notes


def test_with_quantizers_off_the_model_is_still_the_float_one():
    model, batches = calibrated("residual")
    modes = {q: q.mode for q in quantizers(model).values()}

    def in_float():
        for q in modes:
            q.mode = Mode.OFF
        try:
            return model(*batches[0])
        finally:
            for q, mode in modes.items():
                q.mode = mode

    before = in_float()
    bw.reconstruct(model, batches, **FEW)
    assert torch.equal(in_float(), before)
    assert all(p.requires_grad for n, p in model.named_parameters() if "rounding" not in n)


def test_the_same_seed_gives_the_same_model_and_another_seed_does_not():
    models = [run(seed=seed, keep=0.5)[0] for seed in (3, 3, 4)]
    assert same(weights(models[0]), weights(models[1]))
    scales = [[float(q.scale.sum()) for q in quantizers(m).values()] for m in models]
    assert scales[0] == scales[1] != scales[2]


def test_the_random_numbers_of_the_caller_are_left_alone():
    model, batches = calibrated("residual")
    torch.manual_seed(7)
    bw.reconstruct(model, batches, **FEW)
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize("method", ["brecq", "qdrop"])
def test_scales_of_coarse_activations_are_learned(method):
    for recipe, learned in (("W4A8", False), ("W4A4", True)):
        model, batches = calibrated("residual", recipe)
        before = {name: float(q.qparams()[0].sum()) for name, q in quantizers(model).items() if "weight" not in name}
        result = bw.reconstruct(model, batches, method, **FEW)
        assert any(unit.scales for unit in result.units) is learned
        after = {name: float(quantizers(model)[name].qparams()[0].sum()) for name in before}
        assert (before != after) is learned


class Flattens(nn.Module):
    """A view that images with the channels last cannot have."""

    def forward(self, x):
        return x.view(len(x), -1)


@pytest.mark.parametrize("flatten", [nn.Flatten, Flattens])
def test_images_have_their_channels_last_where_the_model_takes_them(flatten, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), flatten(), nn.Linear(96, 3))
    batches, seen = [torch.randn(16, 3, 8, 8) for _ in range(2)], []
    model = bw.calibrate(bw.prepare(net, batches[0], recipe="W4A8"), batches, correct=False)
    rows = Column.rows

    def watched(column, chosen):
        found = rows(column, chosen)
        seen.extend([found] if found.ndim == 4 and found.shape[1] > 3 else [])
        return found

    monkeypatch.setattr(Column, "rows", watched)
    result = bw.reconstruct(model, batches, **FEW)
    assert all(unit.kept for unit in result.units)
    last = [x.is_contiguous(memory_format=torch.channels_last) for x in seen]
    assert last
    assert all(last) if flatten is nn.Flatten else not any(last)


@pytest.mark.parametrize("options", [{"loss": "fisher"}, {"merge": 2}, {"memory_limit": 0}, {"unit": "layer"}])
def test_options_keep_the_promise(options):
    _, _, result = run(**options)
    assert all(unit.after <= unit.before for unit in result.units)
    assert any(unit.kept for unit in result.units)


def test_values_on_disk_are_those_in_memory(tmp_path):
    a, b = (weights(run(memory_limit=limit)[0]) for limit in (0, 1e9))
    assert same(a, b)
    column = Column([2, 1], memory := Memory(0, tmp_path))
    column.append(torch.ones(2, 3))
    column.append(torch.zeros(1, 3))
    assert (memory.files, len(list(tmp_path.iterdir()))) == (1, 1)
    assert column.rows(torch.tensor([2, 0])).tolist() == [[0.0] * 3, [1.0] * 3]
    column.free()
    assert not list(tmp_path.iterdir())


def test_batches_of_other_shapes_are_learned_as_they_are():
    model, _ = calibrated("residual")
    batches = [torch.randn(4, 3, 8, 8), torch.randn(3, 3, 10, 10)]
    result = bw.reconstruct(model, batches, **FEW)
    assert all(unit.after <= unit.before for unit in result.units)


def test_a_user_who_interrupts_gets_a_sound_model(monkeypatch):
    model, batches = calibrated("residual")
    before, state = weights(model), copy.deepcopy(model.state_dict())

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bitwright.reconstruction.roundings.Roundings.pull", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bw.reconstruct(model, batches, **FEW)
    assert same(weights(model), before)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "qdorp"}, "did you mean 'qdrop'"),
        ({"unit": "blocks"}, "did you mean 'block'"),
        ({"steps": 0}, "steps must be a number at least 1, not 0"),
        ({"keep": 1.5}, "keep must be a number from 0 to 1, not 1.5"),
        ({"steps": 1.5}, "steps must be a whole number, not 1.5"),
        ({"beta": (2, 20)}, "beta must fall"),
        ({"beta": 3}, "beta must fall from one positive number to another, not 3"),
        ({"lr": float("inf")}, "lr must be a number at least 0, not inf"),
        ({"memory_limit": "1GB"}, "memory_limit must be a number of bytes of at least 0, not '1GB'"),
    ],
)
def test_wrong_settings_are_refused_by_name(options, words):
    model, batches = calibrated("residual")
    with pytest.raises(ConfigError, match=words):
        bw.reconstruct(model, batches, **options)


def test_a_model_with_nothing_to_learn_is_refused():
    x = torch.randn(4, 3)
    with pytest.raises(ConfigError, match="no weight whose rounding can be learned"):
        bw.reconstruct(bw.calibrate(bw.prepare(nn.Linear(3, 3), x, recipe="FP8"), x), x)
    with pytest.raises(CalibrationError, match="calibrate it before"):
        bw.reconstruct(bw.prepare(nn.Linear(3, 3), x), x)
    with pytest.raises(CalibrationError, match="empty"):
        bw.reconstruct(bw.calibrate(bw.prepare(nn.Linear(3, 3), x), x), [])


@pytest.mark.parametrize("options", [{}, {"prediction": 1.0}, {"loss": "fisher"}])
def test_a_corrected_model_comes_near_the_float_model_as_it_was(options):
    """Correctors change what the model computes in float; units must not approach that."""
    model, batches = calibrated("residual", "W2A4")
    with torch.no_grad():
        for q in (modes := {q: q.mode for q in quantizers(model).values()}):
            q.mode = Mode.OFF
        wanted = [model(*batch) for batch in batches]
        for q, mode in modes.items():
            q.mode = mode
        bw.correct(model, batches, ["norms", "bias"])
        state = copy.deepcopy(bw.float_state_dict(model))
        found = bw.reconstruct(model, batches, "adaround", "block", **{**MORE, **options})
        gaps = [(model(*batch) - want).square().sum() for batch, want in zip(batches, wanted, strict=True)]
    if not options:
        error = float(sum(gaps) / sum(want.square().sum() for want in wanted))
        assert error == pytest.approx(found.units[-1].after, rel=1e-3)
    assert all(unit.after <= unit.before for unit in found.units)
    assert all(torch.equal(value, state[key]) for key, value in bw.float_state_dict(model).items())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: x * torch.nan, "batch 2 of the data to reconstruct with makes NaN in float"),
        (lambda x: x[:, :2], r"the model refuses batch 2 \(float32\[16, 2, 8, 8\]\) .*: RuntimeError"),
    ],
)
def test_data_that_cannot_be_learned_from_is_refused(spoil, words):
    model, batches = calibrated("residual")
    before = weights(model)
    with pytest.raises(CalibrationError, match=words):
        bw.reconstruct(model, [batches[0], (spoil(batches[1][0]),)], **FEW)
    assert same(weights(model), before)


def test_a_caller_in_inference_mode_gets_the_same_model():
    one, two = calibrated("residual"), calibrated("residual")
    bw.reconstruct(*one, **FEW)
    with torch.inference_mode():
        bw.reconstruct(two[0], [(x.clone(),) for (x,) in two[1]], **FEW)
    assert same(weights(one[0]), weights(two[0]))


@pytest.mark.parametrize("steps", [1, 150])
def test_what_gptq_rounded_is_learned_anew_or_kept(tmp_path, steps):
    net, batches = residual_net().eval(), [torch.randn(16, 3, 8, 8) for _ in range(2)]
    model = bw.calibrate(bw.prepare(net, batches[0], recipe={"preset": "W3A3", "correct": ["gptq"]}), batches)
    again, rounded = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    result = bw.reconstruct(model, batches, "qdrop", steps=steps, checkpoint=tmp_path)
    assert all(unit.after <= unit.before for unit in result.units)
    assert {unit.kept for unit in result.units} != ({True} if steps == 1 else {False})
    kept = {name for unit in result.units if unit.kept for name in unit.layers}
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            wanted = layer.weight if name in kept else rounded[f"{name}.weight"]
            assert torch.equal(model.get_submodule(name).weight, wanted), name
    bw.reconstruct(again, batches, "qdrop", steps=steps, checkpoint=tmp_path)
    assert torch.equal(model(batches[0]), again(batches[0]))
