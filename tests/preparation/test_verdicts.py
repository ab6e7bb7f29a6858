"""How operators compute, and why."""

from collections import Counter

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError
from bitwright.preparation import Verdict
from tests.preparation.nets import Probe, Small, Twice, image, placed, specs, verdicts


def test_how_every_operator_computes():
    model = bw.prepare(Probe(), image(), "onnxruntime")
    found = [(e.name, e.verdict.value, e.reason) for e in bw.ledger_of(model).entries]
    folded = "folded into the layer before it"
    assert found == [
        ("stem", "integer", ""),
        ("bn", "fused", folded),
        ("relu", "fused", "computed with stem"),
        ("pool", "carried", ""),
        ("conv1", "integer", ""),
        ("bn1", "fused", folded),
        ("relu", "fused", "computed with conv1"),
        ("conv2", "integer", ""),
        ("bn2", "fused", folded),
        ("add", "integer", ""),
        ("relu", "fused", "computed with add"),
        ("branch", "integer", ""),
        ("cat", "integer", ""),
        ("scaled", "integer", ""),
        ("mul", "fused", folded),
        ("up", "integer", ""),
        ("bn3", "fused", folded),
        ("relu", "fused", "computed with up"),
        ("interpolate", "carried", ""),
        ("gate", "integer", ""),
        ("sigmoid", "integer", ""),
        ("mul_1", "integer", ""),
        ("avg", "integer", ""),
        ("flatten", "carried", ""),
        ("fc", "integer", ""),
    ]
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert entries["stem"].weight == "int7 symmetric narrow channel:0"
    assert entries["up"].weight == "int7 symmetric narrow channel:1"
    assert (entries["fc"].input, entries["fc"].output) == ("uint8 affine tensor", "")
    assert entries["cat"].output == "uint8 affine tensor"
    assert bw.ledger_of(model).count() == Counter({Verdict.INTEGER: 13, Verdict.FUSED: 9, Verdict.CARRIED: 3})


@pytest.mark.parametrize(
    ("skip", "floats"),
    [
        (["fc"], {"fc"}),
        ("fc", {"fc"}),
        (["block"], {"block.0", "block.2"}),
        (["block.0", "other"], {"block.0", "other"}),
        (["*.2"], {"block.2"}),
        (["block.?"], {"block.0", "block.2"}),
        ([r"re:block\.\d"], {"block.0", "block.2"}),
        (["op:conv2d"], {"block.0", "block.2", "other"}),
        (["op:lin*", "op:add"], {"fc", "add"}),
    ],
)
def test_skipping(skip, floats):
    model = bw.prepare(Small(), image(), skip=skip)
    weighty = {"block.0", "block.2", "other", "fc", "add"}
    assert {n for n, v in verdicts(model).items() if v is Verdict.FLOAT} & weighty == floats
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    rules = [skip] if isinstance(skip, str) else skip
    assert all(entries[n].reason in {f"skipped by the rule {r!r}" for r in rules} for n in floats)
    assert all(entries[n].rule in rules for n in floats)
    for name in floats - {"add"}:
        assert type(model.get_submodule(name)) in (nn.Conv2d, nn.Linear)
    bw.calibrate(model, [image()])


def test_a_skipped_activation_is_not_fused():
    model = bw.prepare(Small(), image(), "onnxruntime", skip=["block.1"])
    assert verdicts(model)["block.1"] is Verdict.FLOAT
    assert ("block_0", "block_0", ["block_1"]) in placed(model)


def test_sizes_are_not_operators():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x.view(x.shape[0] * 2 // 2, x.size(-1))).sum() / x.numel()

    model = bw.prepare(Sized(), torch.randn(2, 3))
    assert [e.operator for e in bw.ledger_of(model).entries] == ["reshape", "linear", "sum", "div"]


def test_what_the_backend_cannot_do_may_stay_float():
    net = Small().eval()
    recipe = {"rules": [{"match": "block", "activation": "uint4"}, {"match": "fc", "weight": "int16"}]}
    with pytest.raises(ConfigError, match="the rule 'block': onnxruntime has no activations in uint4"):
        bw.prepare(net, image(), recipe=recipe)
    model = bw.prepare(net, image(), recipe=recipe, allow_float=True)
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert (entries["block.0"].verdict, entries["block.0"].reason) == (
        Verdict.FLOAT,
        "allowed to stay float: onnxruntime has no activations in uint4; it has int8, uint8",
    )
    assert entries["fc"].reason.startswith("allowed to stay float: onnxruntime has no weights in int16")
    assert (entries["fc"].asked, entries["fc"].weight) == (
        "weight int16 symmetric tensor, input uint8 affine tensor",
        "",
    )
    assert entries["other"].verdict is Verdict.INTEGER
    assert any("the rule 'fc' sets weight for fc (linear), but allowed to stay" in n for n in bw.ledger_of(model).notes)
    assert bw.ledger_of(model).recipe.allow_float
    assert bw.Recipe.parse(bw.ledger_of(model).recipe.to_dict()) == bw.ledger_of(model).recipe


def test_force():
    forced = bw.prepare(Small(), image(), "openvino", recipe={"rules": [{"match": "op:mean", "force": True}]})
    entry = next(e for e in bw.ledger_of(forced).entries if e.name == "mean")
    assert (entry.verdict, entry.reason) == (
        Verdict.INTEGER,
        "forced by the rule 'op:mean': openvino runs it in float",
    )
    assert ("add", "add", ["mean"]) in placed(forced)
    rule = {"match": "node:mean", "force": True, "output": "int8"}
    recipe = {"weight": "int8", "activation": "uint8", "rules": [rule]}
    result = bw.prepare(Small(), image(), "academic", recipe=recipe)
    assert specs(result)["mean"] == ("", "", "")  # the last layer, its only reader, has a spec of its own
    recipe["rules"] = [rule, {"match": "fc", "input": "int8"}]
    result = bw.prepare(Small(), image(), "academic", recipe=recipe)
    assert specs(result)["mean"] == ("", "", "int8 symmetric tensor")

    class Odd(nn.Module):
        def forward(self, x):
            return torch.erf(x) + 1.0

    odd = bw.prepare(Odd(), image(), recipe={"rules": [{"match": "op:erf", "force": True, "activation": "int8"}]})
    assert [t for t, _, _ in placed(odd)] == ["x"]
    bw.calibrate(odd, [image()])


def test_calls_of_one_layer_with_different_rules():
    model = bw.prepare(Twice(), image(), recipe={"rules": [{"match": "node:conv_1", "skip": True}]})
    first, _, second = bw.ledger_of(model).entries
    assert (first.verdict, second.verdict) == (Verdict.INTEGER, Verdict.FLOAT)
    assert second.reason == ("skipped by the rule 'node:conv_1', but its weight is quantized for another call")
    assert [t for t, _, _ in placed(model)] == ["x", "conv"]


def test_index_arithmetic_is_not_quantized():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(10, 4), nn.Embedding(32, 4), nn.Linear(4, 3)

        def forward(self, tokens):
            mask = torch.ones(tokens.shape)
            places = (torch.cumsum(mask, 1) * mask).long() + 1
            return self.head(self.words(tokens) + self.places(places))

    tokens = torch.randint(0, 10, (2, 23))
    model = Placed().eval()
    prepared = bw.prepare(model, tokens)
    entries = {e.name: e for e in bw.ledger_of(prepared).entries}
    assert (entries["mul"].verdict, entries["mul"].reason) == (Verdict.FLOAT, "it computes indices")
    assert entries["add_1"].verdict is Verdict.INTEGER  # of floats that only become floats
    bw.calibrate(prepared, tokens)
    with torch.no_grad():
        expected = model(tokens)
        assert (prepared(tokens) - expected).pow(2).mean() < 1e-3 * expected.pow(2).mean()


def test_an_empty_tensor_is_not_quantized():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            cache = torch.zeros(x.shape[0], 0, 4)
            return self.head(torch.cat([cache, self.fc(x)], 1))

    model, x = Cached().eval(), torch.randn(2, 5, 4)
    prepared = bw.calibrate(bw.prepare(model, x), x)
    assert (prepared(x) - model(x)).abs().max() < 0.1
