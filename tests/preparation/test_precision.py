"""Models in half and double precision: quantized with float32 scales."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw

PRECISIONS = (torch.bfloat16, torch.float16, torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.more = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        y = F.relu(self.bn(self.conv(x)))
        return self.fc((y + self.more(y)).mean((2, 3)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_that_is_quantized_in_float32(precision):
    x = torch.randn(8, 3, 8, 8)
    net = Net().eval()
    with torch.no_grad():
        net.bn.running_mean.normal_()
    want = bw.ledger_of(bw.prepare(net, x)).count()
    float32 = net(x)
    net, given = net.to(precision), x.to(precision)
    model = bw.prepare(net, given)
    assert bw.ledger_of(model).count() == want
    assert torch.equal(model(given), net(given))
    bw.calibrate(model, [given])
    out = model(given)
    assert out.dtype == precision
    assert model.conv.weight_quantizer.qparams()[0].dtype == torch.float32
    assert float((out.float() - float32).norm() / float32.norm()) < 0.1
    out.float().sum().backward()
    assert model.conv.weight.grad.dtype == precision
