"""What is ranked is not rounded: equal values have no order that all runtimes share."""

import pytest
import torch
from torch import nn

import bitwright as bw


class Chosen(nn.Module):
    """A trunk of sums, and the rows of it that score best."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.scores, self.bias = nn.Linear(8, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        trunk = self.first(x) + x
        trunk = torch.sigmoid(self.second(trunk)) + trunk
        scores = torch.sigmoid(self.scores(trunk).squeeze(-1))
        best = torch.topk(scores + self.bias, 12, dim=1, sorted=False)[1]
        rows = trunk.gather(1, best.unsqueeze(-1).expand(-1, -1, trunk.shape[-1]))
        return self.last(rows * scores.gather(1, best).unsqueeze(-1))


def entries(model):
    return {e.node: e for e in bw.ledger_of(model).entries}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_scores_that_are_ranked_stay_float(backend, tmp_path):
    torch.manual_seed(0)
    net, x = Chosen().eval(), torch.randn(3, 24, 8)
    model = bw.calibrate(bw.prepare(net, x, backend), [x], progress=False)
    found = entries(model)
    if backend == "onnxruntime":
        reason = "its values are ranked, and rounding would make some of them equal"
        assert [n for n, e in found.items() if e.reason == reason] == ["sigmoid_1", "add_2"]
        assert [found[n].verdict.value for n in ("sigmoid", "add", "add_1")] == ["integer"] * 3
    assert found["scores"].verdict.value == "integer"
    proof = bw.verify(model, bw.export(model, tmp_path / "net.onnx"), [x], latency=False, progress=False)
    assert proof.ok, proof.missed


def test_rules_may_force_them():
    rules = [{"match": "op:sigmoid", "force": True}]
    model = bw.prepare(Chosen().eval(), torch.randn(2, 50, 8), "onnxruntime", recipe={"rules": rules})
    assert entries(model)["sigmoid_1"].verdict.value == "integer"
