"""Inputs that nothing reads, in a whole file or in the part of it that is watched, do not stop a proof."""

import pytest
import torch
from torch import nn

import bitwright as bw


class Masked(nn.Module):
    """The mask is read by the last layer alone, or not at all."""

    def __init__(self, read):
        super().__init__()
        self.first, self.last, self.read = nn.Linear(4, 4), nn.Linear(4, 3), read

    def forward(self, x, mask):
        x = torch.relu(self.first(x))
        return self.last(x * mask.unsqueeze(-1).float()) if self.read else self.last(x)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_files_with_unread_inputs_are_proven(runtime, read, tmp_path):
    torch.manual_seed(0)
    inputs = torch.randn(3, 5, 4), torch.randint(0, 2, (3, 5))
    model = bw.calibrate(bw.prepare(Masked(read).eval(), inputs, runtime), [inputs], progress=False)
    file = bw.export(model, tmp_path / "net.onnx")
    proof = bw.verify(model, file, [inputs], runtimes=[runtime], latency=False, progress=False)
    assert proof.ok, proof.missed
