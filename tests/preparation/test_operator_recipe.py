"""What is asked for one operator: the rule over the recipe over the backend."""

import torch
import torch.nn.functional as F
import yaml
from torch import nn

import bitwright as bw
from bitwright.backends import Backend, find_backend
from bitwright.preparation import Verdict
from bitwright.quantizer import quantizers
from tests.preparation.nets import Probe, Small, image, placed, specs, verdicts


def test_overrides():
    model = bw.prepare(Small(), image(), weight="int4 narrow channel:0", activation="int8 affine")
    assert str(model.fc.weight_quantizer.spec) == "int4 symmetric narrow channel:0"
    assert {str(q.spec) for n, q in quantizers(model).items() if n.startswith("bitwright.quantizers.")} == {
        "int8 affine tensor"
    }
    whole = bw.prepare(Small(), image(), weight="int8 narrow")
    assert str(whole.fc.weight_quantizer.spec) == "int8 symmetric narrow tensor"
    bw.calibrate(whole, [image()])
    assert whole.fc.weight_quantizer.scale.shape == ()


def test_rules_over_recipe_over_backend(tmp_path):
    recipe = {
        "backend": "openvino",
        "weight": "int8 narrow channel:0",
        "activation": {"observer": "ema_minmax", "observer_options": {"ema_ratio": 0.5}},
        "rules": [
            {"match": "block", "weight": "int4 narrow channel:0"},
            {"match": "block.2", "weight": "int6 narrow channel:0", "activation": {"observer": "minmax"}},
        ],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    for source in (recipe, path, bw.Recipe.parse(recipe)):
        model = bw.prepare(Small(), image(), recipe=source)
        assert bw.ledger_of(model).backend.name == "openvino"
        bits = {n: model.get_submodule(n).weight_quantizer.spec.bits for n in ("block.0", "block.2", "other", "fc")}
        assert bits == {"block.0": 4, "block.2": 6, "other": 8, "fc": 8}
        assert model.get_submodule("block.0").input_quantizer.observer.ema_ratio == 0.5
        assert model.get_submodule("block.2").input_quantizer.observer_name == "minmax"
    other = bw.prepare(Small(), image(), "onnxruntime", recipe=recipe)
    assert bw.ledger_of(other).backend is find_backend("onnxruntime")


def test_a_backend_of_ones_own():
    mine = Backend.of(
        name="mine",
        title="only linear layers",
        weights="int8 channel:0",
        activations="int8",
        operators={"integer": {"linear": True}},
    )
    model = bw.prepare(Small(), image(), mine)
    assert {n for n, v in verdicts(model).items() if v is Verdict.INTEGER} == {"fc"}
    assert {e.reason for e in bw.ledger_of(model).entries if e.name == "other"} == {"mine runs it in float"}


def test_weights_only():
    for recipe in ("W4A16", {"weight": {"bits": 4}, "activation": "float"}):
        net = Probe().eval()
        model = bw.prepare(net, image(), recipe=recipe)
        assert placed(model) == []
        entries = {e.name: e for e in bw.ledger_of(model).entries}
        assert entries["stem"].weight == "int4 symmetric narrow channel:0"
        assert (entries["stem"].verdict, entries["stem"].reason) == (
            Verdict.PARTLY,
            "only its weight is quantized, by the recipe",
        )
        assert (entries["add"].verdict, entries["add"].reason) == (Verdict.FLOAT, "left float by the recipe")
        bw.calibrate(model, [image()], correct=False)
        assert len(model.stem.weight_quantizer.integers(model.stem.folded_weight()[0]).unique()) <= 15
        assert model.fc.bias_scale() is None
        x = image(3)
        with torch.no_grad():
            weight = model.fc.weight_quantizer(net.fc.weight)
            assert torch.equal(
                model.fc(x.mean((2, 3)).repeat(1, 3)[:, :8]),
                F.linear(x.mean((2, 3)).repeat(1, 3)[:, :8], weight, net.fc.bias),
            )
        model.train()(x).sum().backward()
        assert model.fc.weight.grad is not None


def test_activations_only():
    model = bw.prepare(Small(), image(), weight="float")
    assert type(model.fc) is nn.Linear
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert (entries["fc"].verdict, entries["fc"].reason) == (Verdict.PARTLY, "its weight stays float by the recipe")
    assert entries["fc"].input == "uint8 affine tensor"
    bw.calibrate(model, [image()])


def test_rules_for_weight_input_and_output():
    rules = [
        {"match": "block.2", "input": {"observer": "ema_minmax"}, "output": "int8 affine", "weight": "int5 narrow"},
        {"match": "fc", "weight": "float"},
    ]
    model = bw.prepare(Small(), image(), "openvino", recipe={"rules": rules})
    found = specs(model)
    assert found["block.2"] == ("int5 symmetric narrow tensor", "uint8 affine tensor", "int8 affine tensor")
    assert found["fc"][0] == ""
    assert model.get_submodule("block.2").input_quantizer.observer_name == "ema_minmax"
    # What reads the result of block.2 has no wish of its own: it gets the producer's.
    assert model.other.input_quantizer.spec == bw.QuantSpec.parse("int8 affine")
    assert [q for t, q, _ in placed(model) if t == "block_2"] == ["block_2"]
    bw.calibrate(model, [image()])


def test_rules_by_class_and_by_node():
    recipe = {"rules": [{"match": "type:Sequential", "skip": True}, {"match": "node:add", "skip": True}]}
    model = bw.prepare(Small(), image(), recipe=recipe)
    floats = {n for n, v in verdicts(model).items() if v is Verdict.FLOAT}
    assert floats == {"block.0", "block.1", "block.2", "add", "mean"}
    model = bw.prepare(Small(), image(), recipe={"rules": [{"match": "type:Conv2d", "weight": {"bits": 3}}]})
    assert {n: s[0][:4] for n, s in specs(model).items() if s[0]} == {
        "block.0": "int3",
        "block.2": "int3",
        "other": "int3",
        "fc": "int7",
    }


def test_bits_mean_what_the_backend_has():
    model = bw.prepare(Small(), image(), recipe="W8A8")
    assert specs(model)["fc"][:2] == ("int7 symmetric narrow channel:0", "uint8 affine tensor")
    assert specs(bw.prepare(Small(), image(), "tensorrt", recipe="W8A8"))["fc"][0] == "int8 symmetric narrow channel:0"
    assert specs(bw.prepare(Small(), image(), "snpe", recipe="W4A8"))["fc"][0] == "uint4 affine tensor"


def test_fp8_and_groups():
    fp8 = bw.prepare(Small(), image(), recipe="FP8")
    assert specs(fp8)["fc"][:2] == ("e4m3 symmetric channel:0", "e4m3 symmetric tensor")
    bw.calibrate(fp8, [image()])
    wide = nn.Sequential(nn.Linear(256, 4), nn.ReLU())
    grouped = bw.prepare(wide, torch.randn(2, 256), recipe="W4A16_G128")
    bw.calibrate(grouped, [torch.randn(2, 256)])
    assert grouped.get_submodule("0").weight_quantizer.scale.shape == (4, 2)
