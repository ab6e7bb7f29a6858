"""Rules with the user's names and kinds reach operators that a schedule replaces."""

import pytest
import torch
from torch import nn

import bitwright as bw


class Net(nn.Module):
    """A mean that becomes a pool, and a product that becomes a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        return torch.matmul(self.conv(x).mean((2, 3)), self.weight)


@pytest.mark.parametrize(
    ("match", "operator"),
    [("op:mean", "adaptive_avg_pool2d"), ("node:mean", "adaptive_avg_pool2d"), ("op:matmul", "linear")],
)
def test_skips_reach_what_takes_the_place(match, operator):
    x = torch.randn(2, 3, 8, 8)
    for skip, verdict in (([], "integer"), ([match], "float")):
        model = bw.prepare(Net().eval(), x, "onnxruntime", skip=skip)
        found = {e.operator: e for e in bw.ledger_of(model).entries}
        assert found[operator].verdict.value == verdict
        assert found[operator].origin == match.partition(":")[2]
        assert found["conv2d"].verdict.value == "integer"
        assert found["conv2d"].origin == ""
