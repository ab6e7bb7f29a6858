"""bw.plan says what prepare would do."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, UnknownNameError
from tests.preparation.nets import Small, image


def test_a_plan_says_what_prepare_would_do_and_changes_nothing():
    net = Small().train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    recipe = {"backend": "openvino", "rules": [{"match": "fc", "skip": True}, {"match": "other", "weight": "int4"}]}
    plan = bw.plan(net, recipe, image())
    assert net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert type(net.fc) is nn.Linear
    prepared = bw.ledger_of(bw.prepare(net, image(), recipe=recipe))
    assert plan.entries == prepared.entries
    lines = str(plan).splitlines()
    assert lines[0] == "openvino: 4 integer, 1 fused, 2 float"
    assert lines[1].split() == ["name", "operator", "computes", "rule", "asked", "input", "weight", "output", "reason"]
    row = next(line for line in lines if line.startswith("other"))
    assert " ".join(row.split()) == (
        "other conv2d integer other weight int4 symmetric tensor, input uint8 affine tensor "
        "uint8 affine tensor int4 symmetric tensor uint8 affine tensor"
    )
    assert next(line for line in lines if line.startswith("fc")).endswith("skipped by the rule 'fc'")
    assert repr(plan) == str(plan)
    table = plan.__rich__()
    assert len(table.rows) == len(plan.entries)
    assert [c.header for c in table.columns] == lines[1].split()


def test_a_plan_of_a_preset_and_its_refusals():
    assert bw.plan(Small(), "W4A8", image()).entries[0].weight == "int4 symmetric narrow channel:0"
    assert bw.plan(Small(), None, image(), "snpe").backend.name == "snpe"
    with pytest.raises(ConfigError, match="plan needs example inputs to capture the model"):
        bw.plan(Small(), "W4A8")
    with pytest.raises(UnknownNameError, match="the rule 'fcc' matches no layer: did you mean 'fc'"):
        bw.plan(Small(), {"rules": [{"match": "fcc", "skip": True}]}, image())
