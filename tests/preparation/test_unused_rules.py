"""Rules that change nothing are mistakes."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, UnknownNameError
from bitwright.preparation import Verdict
from tests.preparation.nets import Small, image


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"match": "op:mean", "input": "uint8"},
            "sets input for mean (mean), but onnxruntime runs it in float; force: ",
        ),
        ({"match": "add", "weight": "int8"}, "the rule 'add' sets weight for add (add), but it has no weight"),
    ],
)
def test_a_rule_without_effect_is_refused(rule, message):
    with pytest.raises(ConfigError) as caught:
        bw.prepare(Small(), image(), recipe={"rules": [rule]})
    assert message in str(caught.value)
    bw.prepare(Small(), image(), recipe={"rules": [rule | {"optional": True}]})
    # A rule that a later one overrules is not a mistake.
    bw.prepare(Small(), image(), recipe={"rules": [rule, {"match": rule["match"], "skip": True}]})


def test_rules_may_name_what_simplifying_takes_away():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    prepared = bw.prepare(model, torch.randn(2, 4), skip=["1"])
    assert [e.verdict for e in bw.ledger_of(prepared).entries] == [Verdict.INTEGER, Verdict.INTEGER]
    with pytest.raises(UnknownNameError, match="the rule '3' matches no layer"):
        bw.prepare(model, torch.randn(2, 4), skip=["3"])
