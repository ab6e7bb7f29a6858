"""Capture: what the user asks of it: leaves, preserved attributes, fixed arguments, an explanation."""

import copy
import inspect
import re

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, UnknownNameError
from bitwright.graph import CapturedModel, capture_model
from bitwright.nn import QuantConv2d
from bitwright.preparation import Verdict
from tests.graph.capture.capturing import DataDependent, image, prepared


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv, self.act = nn.Conv2d(width, width, 3, padding=1), nn.ReLU()

    def forward(self, x):
        return self.act(self.conv(x)) + x

    def describe(self):
        return f"a block of {self.conv.out_channels}"


class Backbone(nn.Module):
    kind = "small"

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def features(self, x):
        return [self.stem(x), self(x)]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(4, 2)

    def forward(self, x, scale=1.0, *, tanh=False, extra=None):
        x = self.head(self.backbone(x).mean((2, 3))) * scale
        x = x.tanh() if tanh else x
        return x if extra is None else x + extra

    def predict(self, x):
        return super().__call__(x).argmax(1)


def convolutions(model):
    return {name for name, m in model.named_modules() if isinstance(m, QuantConv2d)}


def entries(model):
    return {e.name: e for e in bw.ledger_of(model).entries}


# ---------------------------------------------------------------------------------------------------- leaves


@pytest.mark.parametrize(
    ("leaves", "chosen"),
    [
        (["backbone.blocks.1"], {1}),
        ("backbone.blocks.1", {1}),
        (["backbone.blocks.[01]"], {0, 1}),
        (["*.blocks.*"], {0, 1, 2}),
        ([Block], {0, 1, 2}),
        (Block, {0, 1, 2}),
        (["type:Block"], {0, 1, 2}),
        ([f"type:{Block.__module__}.Block", "backbone.blocks.0.conv"], {0, 1, 2}),
    ],
    ids=str,
)
def test_a_leaf_stays_whole_and_float(leaves, chosen):
    model, x = Classifier().eval(), image()
    quantized = bw.prepare(model, x, leaves=leaves)
    every = {f"backbone.blocks.{i}" for i in range(3)}
    named = {f"backbone.blocks.{i}" for i in chosen}
    assert convolutions(quantized) == {"backbone.stem"} | {f"{b}.conv" for b in every - named}
    calls = {str(n.target) for n in quantized.graph.nodes if n.op == "call_module"}
    assert named <= calls
    for name in named:
        assert type(quantized.get_submodule(name)) is Block
        assert entries(quantized)[name].verdict is Verdict.FLOAT
        assert entries(quantized)[name].reason.startswith("a leaf by request: ")
        assert entries(quantized)[name].operator == "Block"
    bw.calibrate(quantized, [x])
    with torch.no_grad():
        assert torch.allclose(quantized(x), model(x), atol=0.05)


def test_a_leaf_that_is_a_layer_is_not_quantized():
    quantized = bw.prepare(Classifier(), image(), leaves=["backbone.stem", nn.Linear])
    reasons = {name: e.reason for name, e in entries(quantized).items()}
    assert reasons["backbone.stem"] == "a leaf by request: 'backbone.stem'"
    assert reasons["head"] == "a leaf by request: 'type:torch.nn.modules.linear.Linear'"
    assert type(quantized.head) is nn.Linear
    assert type(quantized.get_submodule("backbone.stem")) is nn.Conv2d


def test_leaves_in_the_recipe():
    quantized = bw.prepare(Classifier(), image(), recipe={"leaves": ["type:Block"]}, leaves=["head"])
    assert convolutions(quantized) == {"backbone.stem"}
    assert type(quantized.head) is nn.Linear
    assert bw.Recipe.parse({"leaves": ["type:Block"]}).leaves == ("type:Block",)


def test_a_leaf_inside_an_island():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), DataDependent()).eval()
    quantized = bw.prepare(model, image(), leaves=["1.inner"])
    assert convolutions(quantized) == {"0", "1.single"}
    assert type(quantized.get_submodule("1.inner")) is nn.Sequential
    assert entries(quantized)["1.inner"].reason == "a leaf by request: '1.inner'"
    x = image(3)
    assert torch.equal(quantized(x), model(x))


def test_a_leaf_may_hold_what_cannot_be_traced():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), DataDependent()).eval()
    quantized = bw.prepare(model, image(), leaves=[DataDependent])
    assert bw.ledger_of(quantized).islands == {}
    assert convolutions(quantized) == {"0"}


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            "backbone.block.1",
            "the leaf 'backbone.block.1' is not a module of the model: did you mean 'backbone.blocks.1'",
        ),
        ("type:Blocck", "the leaf 'type:Blocck' is not a module of the model: did you mean 'type:Block' or "),
        ("nothing.*", "the leaf 'nothing.*' is not a module of the model: known are "),
        (nn.LSTM, "the leaf 'type:torch.nn.modules.rnn.LSTM' is not a module of the model"),
    ],
    ids=str,
)
def test_a_leaf_that_names_nothing(leaf, message):
    with pytest.raises(UnknownNameError, match=re.escape(message)):
        bw.prepare(Classifier(), image(), leaves=[leaf])


def test_a_leaf_of_another_kind():
    with pytest.raises(ConfigError, match=r"a leaf must be a name, a glob, 'type:…' or a module's class, not 3"):
        bw.prepare(Classifier(), image(), leaves=[3])


# ---------------------------------------------------------------------------------- attributes that are preserved


def test_attributes_and_methods_are_preserved():
    model, x = Classifier().eval(), image()
    wish = {"": ["predict"], "backbone": ["features", "kind"], "backbone.blocks.2": ["describe"]}
    quantized = bw.prepare(model, x, preserve_attr=wish)
    assert isinstance(quantized, CapturedModel)
    assert isinstance(quantized, Classifier)
    assert torch.equal(quantized.predict(x), model.predict(x))
    assert quantized.backbone.kind == "small"
    assert quantized.backbone.blocks[2].describe() == "a block of 4"
    for got, expected in zip(quantized.backbone.features(x), model.backbone.features(x), strict=True):
        assert torch.equal(got, expected)
    twin = copy.deepcopy(quantized)
    assert twin.backbone.blocks[2].describe() == "a block of 4"
    for captured in (quantized, twin):
        assert type(captured).predict is Classifier.predict
        assert inspect.signature(captured.forward) == inspect.signature(model.forward)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = type(quantized).nothing


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"": ["predictt"]},
            "(Classifier) has no attribute 'predictt' to preserve: did you mean 'predict' or ",
        ),
        (
            {"backbone": "feature"},
            "'backbone' (Backbone) has no attribute 'feature' to preserve: did you mean",
        ),
        (
            {"backbon": []},
            "preserve_attr names the module 'backbon', which the model does not have: did you mean 'backbone'",
        ),
        (["predict"], "preserve_attr must be a dict of module names and attribute names, not ['predict']"),
    ],
    ids=str,
)
def test_attributes_that_are_not_there(wish, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        bw.prepare(Classifier(), image(), preserve_attr=wish)


# ------------------------------------------------------------------------------------------------ fixed arguments


def test_concrete_arguments():
    model, x = Classifier().eval(), image()
    quantized = bw.prepare(model, x, concrete_args={"tanh": True, "scale": 2.0})
    expected = model(x, 2.0, tanh=True)
    for given in (((x,), {}), ((x, 2.0), {}), ((x,), {"tanh": True, "extra": None})):
        assert torch.equal(quantized(*given[0], **given[1]), expected)
    for given, message in (
        (((x, 3.0), {}), "the input 'scale' must be 2.0, as when the model was captured, not 3.0"),
        (((x,), {"tanh": False}), "the input 'tanh' must be True, as when the model was captured, not False"),
        (((x,), {"extra": 1.0}), "the input 'extra' must be None, as when the model was captured, not 1.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            quantized(*given[0], **given[1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        quantized(x, wrong=1)
    assert [n.target for n in quantized.graph.nodes if n.op == "placeholder"] == ["x", "scale", "tanh"]


def test_a_fixed_argument_between_others_leaves_the_signature():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, times, mode, y):
            for _ in range(times):
                x = self.fc(x)
            return x + y if mode["add"] else x - y

    model, x, y = Between().eval(), torch.randn(2, 3), torch.randn(2, 3)
    fixed = {"times": 2, "mode": {"add": False}}
    captured = capture_model(model, {"x": x, "y": y}, concrete_args=fixed).model
    assert torch.equal(captured(x, y), model(x, 2, {"add": False}, y))
    assert torch.equal(captured(y=y, x=x), model(x, 2, {"add": False}, y))


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"tan": True}, "Classifier.forward has no argument 'tan': did you mean 'tanh'?"),
        (["tanh"], "concrete_args must be a dict of argument names and values, not ['tanh']"),
    ],
    ids=str,
)
def test_concrete_arguments_that_cannot_be(fixed, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        bw.prepare(Classifier(), image(), concrete_args=fixed)


# ---------------------------------------------------------------------------------------------------- explanation


def test_the_explanation():
    class Deciding(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] > 1 else x

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.by_data, self.deciding = Backbone(), DataDependent(), Deciding()
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            return self.deciding(self.by_data(self.backbone(x)))

    told = bw.explain_capture(Whole(), image(), leaves=["backbone.blocks.1"])
    states = {p.path: p.state for p in told.places}
    assert states == {
        "": "captured",
        "backbone": "traced",
        "backbone.stem": "layer",
        "backbone.blocks": "traced",
        "backbone.blocks.0": "traced",
        "backbone.blocks.0.conv": "layer",
        "backbone.blocks.0.act": "layer",
        "backbone.blocks.1": "leaf",
        "backbone.blocks.2": "traced",
        "backbone.blocks.2.conv": "layer",
        "backbone.blocks.2.act": "layer",
        "by_data": "island",
        "by_data.inner": "captured",
        "by_data.inner.0": "layer",
        "by_data.inner.1": "layer",
        "by_data.inner.2": "layer",
        "by_data.single": "single",
        "deciding": "traced",
        "unused": "unused",
    }
    text = str(told)
    line = Deciding.forward.__code__.co_firstlineno + 1
    assert f"  if of gt gave True at {__file__}:{line}" in text
    by_data = f"{DataDependent.forward.__code__.co_filename}:{DataDependent.forward.__code__.co_firstlineno + 1}"
    assert f"  by_data [DataDependent] island: Untraceable: if needs the data of a tensor (gt) at {by_data}" in text
    assert "    blocks [ModuleList] traced\n" in text
    assert "      1 [Block] leaf: by request: 'backbone.blocks.1'\n" in text
    assert text.startswith("(the model) [Whole] captured: ")
    assert "\n2 graphs with " in text


def test_the_explanation_of_a_plain_model():
    told = bw.explain_capture(nn.Sequential(nn.Linear(3, 3)), torch.randn(1, 3))
    assert str(told) == "(the model) [Sequential] captured: 3 nodes\n  0 [Linear] layer\n1 graph with 3 nodes"


def test_a_prepared_model_is_what_was_explained():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    assert bw.explain_capture(model, image()).guards == bw.ledger_of(prepared(model, image())).guards == []
