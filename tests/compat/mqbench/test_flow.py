"""MQBench's switches, training, and a model that waits for its first call."""

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.compat.mqbench import (
    disable_all,
    enable_all,
    enable_calibration,
    enable_calibration_quantization,
    enable_calibration_woquantization,
    enable_quantization,
    prepare_by_platform,
)
from bitwright.compat.mqbench.convert_deploy import convert_deploy
from bitwright.errors import CalibrationError, ConfigError, UnknownNameError
from bitwright.preparation import ledger_of
from bitwright.quantizer import Mode, quantizers
from tests.compat.mqbench.nets import (
    ACADEMIC,
    calibrated,
    prepared,
)


def test_switches(model, x):
    made = prepared(model, x)
    parts = [
        [q for n, q in quantizers(made).items() if "_weight_quantizer" in n],
        [q for n, q in quantizers(made).items() if "_weight_quantizer" not in n],
    ]
    with pytest.raises(CalibrationError, match=r"has no range yet"):
        enable_quantization(made)
    assert all(q.mode is Mode.OFF for part in parts for q in part)
    calibrated(made, x, 2 * x)
    assert all(q.mode is Mode.QUANTIZE and q.calibrated for part in parts for q in part)
    reference = bw.calibrate(prepared(model, x), [x, 2 * x])
    assert torch.equal(made(x), reference(x))
    disable_all(made)
    assert torch.equal(made(x), model(x))
    enable_quantization(made)
    assert torch.equal(made(x), reference(x))
    enable_calibration_woquantization(made, "act_fake_quant")
    made(10 * x)
    assert all(q.mode is Mode.OFF for q in parts[0])
    assert all(q.mode is Mode.OBSERVE for q in parts[1])
    enable_calibration_woquantization(made, "weight_fake_quant")
    made(x)
    enable_quantization(made)
    wider = quantizers(made)["bitwright.quantizers.x"].scale / quantizers(reference)["bitwright.quantizers.x"].scale
    assert wider > 1.5
    with pytest.raises(
        UnknownNameError, match=r"no quantizer has 'act_fakequant' in its name: did you mean 'act_fake_"
    ):
        enable_calibration_woquantization(made, "act_fakequant")


def test_ranges_that_follow_the_data(model, x):
    made = prepared(model, x)
    enable_all(made)
    first = quantizers(made)["bitwright.quantizers.x"]
    made(x)
    small = first.scale.clone()
    made(100 * x)
    assert first.scale > 2 * small
    enable_quantization(made)
    fixed = first.scale.clone()
    made(1000 * x)
    assert torch.equal(first.scale, fixed)
    enable_quantization(made, act_cali_on=True)
    weight = made.fc.weight_quantizer
    before = weight.scale.clone()
    with torch.no_grad():
        made.fc.weight.mul_(5)
    made(1000 * x)
    assert first.scale > fixed
    assert torch.equal(weight.scale, before)
    enable_quantization(made, weight_cali_on=True)
    made(x)
    assert torch.allclose(weight.scale, before * 5)
    enable_calibration_quantization(made, "weight_fake_quant")
    assert first.mode is Mode.OFF
    assert weight.mode is Mode.QUANTIZE


def test_a_model_without_example_inputs_is_prepared_at_once(model, x):
    model.layer1.train()
    waiting = prepare_by_platform(model, "Tensorrt")
    told = prepare_by_platform(model, "Tensorrt", example_inputs=x)
    assert [n for n, _ in waiting.named_parameters()] == [n for n, _ in told.named_parameters()]
    assert [n.name for n in waiting.graph.nodes] == [n.name for n in told.graph.nodes]
    assert "fc" in waiting.code
    assert waiting.fc.weight is not model.fc.weight
    optimizer = torch.optim.SGD(waiting.parameters(), lr=0.1)
    waiting.load_state_dict(model.state_dict())
    copied = copy.deepcopy(waiting)
    enable_calibration(waiting)
    waiting(x)
    assert ledger_of(waiting).backend.name == "tensorrt"
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in waiting.parameters()}
    enable_quantization(waiting)
    reference = bw.calibrate(bw.prepare(model, x, "tensorrt"), [x])
    assert torch.equal(waiting.eval()(x), reference(x))
    again = copy.deepcopy(waiting)
    assert torch.equal(again(x), reference(x))
    assert torch.equal(calibrated(copied, x).eval()(x), reference(x))


def test_modes_and_frozen_norms(model, x):
    model.train()
    made = prepared(model, x)
    assert made.training
    assert not made.layer1[0].bn1.training
    before = made.layer1[0].bn1.running_mean.clone()
    made.train()(x)
    assert torch.equal(made.layer1[0].bn1.running_mean, before)
    free = prepare_by_platform(model, "Academic", ACADEMIC, freeze_bn=False, example_inputs=x)
    free(x)
    assert not torch.equal(free.layer1[0].bn1.running_mean, before)
    assert type(free.layer1[0].bn1) is nn.BatchNorm2d
    still = prepare_by_platform(model, "Academic", ACADEMIC, is_qat=False, example_inputs=x)
    assert not any(m.training for m in still.modules())
    assert made.fc.weight is not model.fc.weight


@pytest.mark.parametrize("method", ["LearnableFakeQuantize", "PACTFakeQuantize", "DSQFakeQuantize", "TqtFakeQuantize"])
def test_an_optimizer_made_before_calibration_has_what_is_learned(model, x, method):
    scheme = {"bit": 4, "pot_scale": method.startswith("Tqt")}
    qconfig = {
        "w_fakequantize": "LearnableFakeQuantize",
        "a_fakequantize": method,
        "w_qscheme": {"bit": 4, "per_channel": True},
        "a_qscheme": scheme,
    }
    made = prepare_by_platform(model, "Academic", {"extra_qconfig_dict": qconfig}, example_inputs=x)
    assert torch.equal(made(x), model(x))
    held = {id(p) for p in torch.optim.SGD(made.parameters(), lr=0.1).param_groups[0]["params"]}
    made.load_state_dict(model.state_dict())
    calibrated(made, x)
    assert held == {id(p) for p in made.parameters()}
    made(x).square().sum().backward()
    assert made.fc.weight_quantizer.method.scale.grad.abs().sum() > 0
    again = prepare_by_platform(model, "Academic", {"extra_qconfig_dict": qconfig}, example_inputs=x)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(x), made(x))


class Rows(nn.Module):
    """Its graph depends on the number of samples, but not the Parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y.mean((2, 3)) if x.shape[0] > 3 else y.mean((2, 3)).contiguous()


def test_a_first_call_that_takes_another_way_prepares_again(x):
    model = Rows()
    made = prepare_by_platform(model, "Tensorrt")
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    before = list(made.parameters())
    made.eval()
    calibrated(made, x)
    assert all(one is other for one, other in zip(before, made.parameters(), strict=True))
    assert not any(module.training for module in made.modules())
    told = calibrated(prepare_by_platform(model, "Tensorrt", example_inputs=x).eval(), x)
    assert torch.equal(made(x), told(x))
    made(x).sum().backward()
    optimizer.step()
    loaded = prepare_by_platform(model, "Tensorrt")
    loaded.load_state_dict(made.state_dict())
    enable_quantization(loaded)
    assert torch.equal(loaded.eval()(x), made(x))


class Branches(Rows):
    """With more than three samples there is one more product, and its quantizer."""

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y * y if x.shape[0] > 3 else y)


def test_a_first_call_that_would_change_the_parameters_is_refused(x):
    made = prepare_by_platform(Branches(), "Tensorrt")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"lead to a different graph than .* and other Parameters"):
            made(x)
    assert made(x[:2]).shape == (2, 4, 6, 6)


class Pair(nn.Module):
    """Nobody knows what its second argument is like."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, a, b):
        return self.fc(a) + b


def test_where_no_inputs_are_found_nothing_is_lost_silently():
    model, a = Pair(), torch.randn(4, 3)
    waiting = prepare_by_platform(model, "Tensorrt")
    refused = [
        lambda: torch.optim.SGD(waiting.parameters(), lr=0.1),
        lambda: waiting.graph,
        lambda: waiting.code,
        lambda: waiting.load_state_dict({**model.state_dict(), "fc._weight_quantizer.scale": torch.ones(3)}),
        lambda: bw.calibrate(waiting, [(a, a)]),
    ]
    for attempt in refused:
        with pytest.raises(ConfigError, match=r"this Pair is prepared at its first call.*or pass example_inputs"):
            attempt()
    waiting.load_state_dict(model.state_dict())
    copied = copy.deepcopy(waiting)
    for made in (waiting, copied):
        enable_calibration(made)
        made(a, a)
        enable_quantization(made)
    reference = bw.calibrate(bw.prepare(model, (a, a), "tensorrt"), [(a, a)])
    assert torch.equal(waiting(a, a), reference(a, a))
    assert torch.equal(copied(a, a), reference(a, a))
    assert len(list(waiting.parameters())) > len(list(model.parameters()))


@pytest.mark.parametrize(
    "part", [lambda m: m.fc.parameters(), lambda m: [m.fc.weight], lambda m: nn.Sequential(m).parameters()]
)
def test_an_optimizer_of_parts_is_refused_where_it_would_miss_scales(part):
    a = torch.randn(4, 3)
    fixed = prepare_by_platform(Pair(), "STPU")  # its scales do not train: nothing is missed
    optimizer = torch.optim.SGD(part(fixed), lr=0.1)
    assert fixed(a, a).shape == a.shape
    waiting = prepare_by_platform(Pair(), "Tensorrt")
    optimizer = torch.optim.Adam(part(waiting), lr=0.1)
    with pytest.raises(ConfigError, match=r"this Adam was made before .* never train .*scale, …: make it after"):
        waiting(a, a)
    del optimizer
    waiting(a, a)
    optimizer = torch.optim.Adam(waiting.parameters(), lr=0.1)
    held = {id(value) for value in optimizer.param_groups[0]["params"]}
    assert held == {id(value) for name, value in waiting.named_parameters()}


class Broken(torch.optim.SGD):
    """Fails before torch has made its groups."""

    def __init__(self, params):
        raise ValueError("no")


def test_only_optimizers_that_can_train_count():
    a = torch.randn(4, 3)
    waiting, other = (prepare_by_platform(Pair(), "Tensorrt") for _ in range(2))
    elsewhere = torch.optim.SGD(other.fc.parameters(), lr=0.1)  # of another model, even of another copy
    try:
        Broken(waiting.fc.parameters())
    except ValueError as error:
        failed = error  # its traceback keeps what was made
    gone = torch.optim.SGD(waiting.fc.parameters(), lr=0.1)
    gone.myself = gone  # a cycle, as a scheduler's wrapper is
    scheduler = torch.optim.lr_scheduler.StepLR(gone, 2)
    del gone, scheduler
    assert waiting(a, a).shape == a.shape
    assert failed.args == ("no",)
    with pytest.raises(ConfigError, match=r"this SGD was made before"):
        other(a, a)
    grouped = torch.optim.Adam([{"params": []}, {"params": [other.fc.bias], "lr": 1.0}])
    elsewhere.param_groups.clear()
    with pytest.raises(ConfigError, match=r"this Adam was made before"):
        other(a, a)
    del grouped
    assert other(a, a).shape == a.shape


class OfDict(nn.Module):
    """Reads a dict, and puts what it finds there, too."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)

    def forward(self, batch):
        batch.update({"features": {"deep": self.conv(batch["image"])}})
        batch["out"] = self.head(batch["features"]["deep"])
        return batch


def test_inputs_are_found_for_models_of_a_dict(tmp_path):
    model, image = OfDict(), torch.randn(2, 3, 9, 9)
    made = prepare_by_platform(model.train(), "SNPE")
    assert "batch['image']" in made.code
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    enable_calibration(made)
    made({"image": image})
    enable_quantization(made)
    made({"image": image})["out"].sum().backward()
    optimizer.step()
    made.eval()
    convert_deploy(made, "SNPE", dummy_input={"image": image}, output_path=tmp_path, model_name="net")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    found = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    expected = made({"image": image})["out"].detach().numpy()
    step = float(quantizers(made)["bitwright.quantizers.head"].scale)
    close = [np.abs(out - expected).max() <= step * 1.001 for out in found if out.shape == expected.shape]
    assert any(close)


def test_the_last_dict_of_a_dummy_input_is_of_keywords(tmp_path):
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    made = calibrated_on(prepare_by_platform(Pair(), "Tensorrt", example_inputs=(a, b)), a, b)
    for given in ((a, {"b": b}), {"a": a, "b": b}, (a, b)):
        path = convert_deploy(made, "Tensorrt", dummy_input=given, output_path=tmp_path)
        names = {i.name for i in onnxruntime.InferenceSession(path).get_inputs()}
        assert names == {"a", "b"}


def calibrated_on(model, *inputs):
    enable_calibration(model)
    model(*inputs)
    enable_quantization(model)
    return model


@pytest.mark.parametrize(
    ("layers", "x"),
    [
        ([nn.Embedding(5, 4), nn.Linear(4, 2)], torch.zeros(3, 7, dtype=torch.int64)),
        ([nn.Conv1d(2, 3, 5), nn.Flatten(), nn.Linear(180, 2)], torch.randn(1, 2, 64)),
        ([nn.Conv2d(3, 4, 3, 2), nn.Flatten(), nn.Linear(4 * 111 * 111, 2)], torch.randn(1, 3, 224, 224)),
        ([nn.BatchNorm3d(2), nn.Conv3d(2, 3, 3)], torch.randn(1, 2, 5, 6, 7)),
        ([nn.Linear(3, 4).double()], torch.randn(2, 3).double()),
    ],
)
def test_inputs_are_found_for_all_kinds_of_first_layers(layers, x):
    model = nn.Sequential(*layers).eval()
    made = prepare_by_platform(model, "Tensorrt")
    assert isinstance(made, torch.fx.GraphModule)
    assert torch.equal(made(x), model(x))


def test_a_refused_first_call_can_be_made_again(model, x):
    waiting = prepare_by_platform(model, "Tensorrt")
    with pytest.raises(ConfigError, match="does not take the example inputs"):
        waiting(x[0, 0])
    assert torch.equal(waiting(x), model(x))
