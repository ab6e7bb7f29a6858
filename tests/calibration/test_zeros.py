"""Tensors that are zero on all calibration data."""

import torch
from torch import nn

import bitwright as bw


def test_zeros_before_a_layer_leave_its_weight_scales_alone():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, groups=2)

        def forward(self, x):
            return self.conv(x * torch.relu(-x.abs() - 1))  # a product of zeros only

    x = torch.randn(2, 4, 6, 6)
    model = bw.calibrate(bw.prepare(Gated().eval(), x, "onnxruntime"), [x])
    largest = model.conv.weight.detach().abs().flatten(1).amax(1)
    assert torch.allclose(model.conv.weight_quantizer.scale.flatten() * 63, largest)
    bias = model.conv.bias.reshape(1, -1, 1, 1)
    assert float((model(x) - bias).abs().max()) <= float(bias.max() - bias.min()) / 255  # the result has 8 bits
