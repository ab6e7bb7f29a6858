import copy
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.preparation import Verdict, decision_on, decisions_of


class Net(nn.Module):
    """A layer called twice, a fused activation, a float one, a folded norm and something that only moves values."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.fc, self.soft = nn.Linear(4, 4), nn.Softmax(-1)

    def forward(self, x):
        x = self.act(self.norm(self.conv(x))).mean((2, 3)).reshape(-1, 4)
        return self.soft(self.fc(self.fc(x)))


X = torch.randn(2, 3, 8, 8)


@pytest.fixture
def model():
    return bw.prepare(Net().eval(), X, "onnxruntime", skip=["op:softmax"])


def nodes(model):
    return {node.name: node for node in model.graph.nodes}


def test_the_table_says_what_was_decided_and_what_it_got(model):
    by_name = {n: (d.kind, d.verdict) for n, d in decisions_of(model).items()}
    assert by_name == {
        "conv": ("conv2d", Verdict.INTEGER),
        "norm": ("batch_norm", Verdict.FUSED),
        "act": ("relu", Verdict.FUSED),
        "adaptive_avg_pool2d": ("adaptive_avg_pool2d", Verdict.INTEGER),
        "reshape": ("reshape", Verdict.CARRIED),
        "fc": ("linear", Verdict.INTEGER),
        "fc_1": ("linear", Verdict.INTEGER),
        "soft": ("softmax", Verdict.FLOAT),
    }
    conv = decision_on(nodes(model)["conv"])
    assert conv.inputs == ("bitwright.quantizers.x",)
    assert conv.weight == "conv._weight_quantizer"
    assert model.conv.input_quantizer.quantizer is model.get_submodule(conv.inputs[0])
    soft = decision_on(nodes(model)["soft"])
    assert soft.rule is not None
    assert soft.judgement.reason == "skipped by the rule 'op:softmax'"


def test_the_ledger_is_computed_from_the_table(model):
    entries = bw.ledger_of(model).entries
    assert [(e.node, e.name, e.verdict, e.reason) for e in entries] == [
        (node, d.name, d.verdict, d.judgement.reason) for node, d in decisions_of(model).items()
    ]
    assert {e.graph for e in entries} == {""}
    assert [e.name for e in entries].count("fc") == 2
    for entry, (_, decision) in zip(entries, decisions_of(model).items(), strict=True):
        assert entry.input == ", ".join(dict.fromkeys(str(model.get_submodule(n).spec) for n in decision.inputs))
    with pytest.raises(FrozenInstanceError):
        entries[0].reason = "another"


def test_a_copy_has_the_same_decisions_on_its_own_nodes(model):
    other = copy.deepcopy(model)
    assert decisions_of(other) is not decisions_of(model)
    for (name, first), second in zip(nodes(model).items(), nodes(other).values(), strict=True):
        assert decision_on(first) is decision_on(second), name
    decisions_of(other).judge("conv", decision_on(nodes(other)["soft"]).judgement)
    assert decision_on(nodes(model)["conv"]).verdict is Verdict.INTEGER


def test_nothing_was_decided_on_other_graphs(model):
    assert list(decisions_of(nn.Linear(1, 1)).items()) == []
    assert decision_on(nodes(model)["x"]) is None
    assert decision_on(torch.fx.Graph().placeholder("x")) is None


def test_decisions_in_parts_of_a_model_that_runs_as_written():
    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.loose = Net(), nn.Linear(4, 4)

        def forward(self, x):
            x = self.part(x)
            return self.loose(x) if x.detach().numpy().sum() < 1e9 else x

    prepared = bw.prepare(Island().eval(), X, "onnxruntime")
    entries = {(e.graph, e.node): e for e in bw.ledger_of(prepared).entries}
    assert entries["part", "conv"].name == "part.conv"
    assert decision_on(nodes(prepared.part)["conv"]).name == "part.conv"
    loose = entries[None, ""]
    assert (loose.name, loose.verdict) == ("loose", Verdict.INTEGER)
    assert loose.input == str(prepared.loose.input_quantizer.spec)
    assert loose.weight == str(prepared.loose.weight_quantizer.spec)


def test_a_loose_layer_whose_input_stays_float_is_only_partly_quantized():
    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.loose = nn.Linear(4, 4)

        def forward(self, x):
            return self.loose(x) if x.detach().numpy().sum() < 1e9 else x

    prepared = bw.prepare(Island().eval(), torch.randn(2, 4), recipe="W8A16")
    (entry,) = bw.ledger_of(prepared).entries
    assert (entry.verdict, entry.reason) == (Verdict.PARTLY, "only its weight is quantized, by the recipe")
    assert entry.input == ""
    assert entry.weight == str(prepared.loose.weight_quantizer.spec)


def test_every_reason_stands_in_one_file():
    root = Path(bw.__file__).parent
    told = [p.name for p in root.rglob("*.py") if re.search(r"Judgement\(\s*Verdict\.\w+, ", p.read_text())]
    assert told == ["verdicts.py"]
