"""Plain numbers among tensors: taken from integers, and as limits at infinity."""

import math

import onnxruntime
import pytest
import torch
from torch import nn

import bitwright as bw


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Conv1d(2, 4, 1), nn.Conv1d(4, 3, 1), function

    def forward(self, x, mask):
        return self.last(self.function(self.first(x), mask.unsqueeze(1)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask: x + (1.0 - mask) * -4.0,
        lambda x, mask: x + torch.rsub(mask, 2.5),
        lambda x, mask: x * torch.rsub(mask, 1.0, alpha=3),
        lambda x, mask: x - (1.0 - x) * (2 - mask),
        lambda x, mask: x.clamp(0, math.inf),
        lambda x, mask: x.clamp(-math.inf, math.inf),
        lambda x, mask: torch.clamp(x, min=-math.inf, max=0.5),
        lambda x, mask: x.clamp(0.25, 6.0),
    ],
)
def test_files_compute_what_torch_does(function, tmp_path):
    torch.manual_seed(0)
    net, inputs = Net(function).eval(), (torch.randn(3, 2, 5), torch.randint(0, 2, (3, 5)))
    model = bw.calibrate(bw.prepare(net, inputs, "onnxruntime"), [inputs], progress=False)
    file = bw.export(model, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(file)
    (found,) = session.run(None, dict(zip(("x", "mask"), (v.numpy() for v in inputs), strict=True)))
    assert (torch.from_numpy(found) - net(*inputs)).norm() < 0.1 * net(*inputs).norm()
    proof = bw.verify(model, file, [inputs], runtimes=["onnxruntime"], latency=False, progress=False)
    assert proof.ok, proof.missed
