"""Every quantized module without state of its own in time: many in one model, exported once, equal in onnxruntime."""

from pathlib import Path

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright import nn as qnn
from bitwright.quantizer import QuantDescriptor

SEVEN = {"quant_desc_weight": QuantDescriptor(num_bits=7, axis=0)}  # 8 bits saturate on CPUs without VNNI
ACROSS = {"quant_desc_weight": QuantDescriptor(num_bits=7, axis=1)}

IMAGES = {
    "conv": lambda: qnn.QuantConv2d(4, 6, 3, padding=1, padding_mode="replicate", **SEVEN),
    "grouped": lambda: qnn.QuantConv2d(4, 8, 3, stride=2, groups=2, bias=False, **SEVEN),
    "deconv": lambda: qnn.QuantConvTranspose2d(4, 5, 3, stride=2, output_padding=1, **ACROSS),
    "linear": lambda: qnn.QuantLinear(8, 5, **SEVEN),
    "max_pool": lambda: qnn.QuantMaxPool2d(2, stride=1),
    "avg_pool": lambda: qnn.QuantAvgPool2d(3, padding=1, count_include_pad=False),
    "adaptive": lambda: qnn.QuantAdaptiveAvgPool2d(2),
    "batch_norm": lambda: qnn.QuantBatchNorm2d(4),
    "instance_norm": lambda: qnn.QuantInstanceNorm2d(4),
    "layer_norm": lambda: qnn.QuantLayerNorm(8),
    "relu": lambda: qnn.QuantReLU(),
    "relu6": lambda: qnn.QuantReLU6(),
    "leaky": lambda: qnn.QuantLeakyReLU(0.2),
    "silu": lambda: qnn.QuantSiLU(),
    "hardswish": lambda: qnn.QuantHardswish(),
    "hardsigmoid": lambda: qnn.QuantHardsigmoid(),
    "sigmoid": lambda: qnn.QuantSigmoid(),
    "tanh": lambda: qnn.QuantTanh(),
    "gelu": lambda: qnn.QuantGELU(approximate="tanh"),
    "mish": lambda: qnn.QuantMish(),
    "elu": lambda: qnn.QuantELU(),
    "prelu": lambda: qnn.QuantPReLU(4),
    "softmax": lambda: qnn.QuantSoftmax(dim=1),
}
LINES = {
    "conv": lambda: qnn.QuantConv1d(4, 6, 3, dilation=2, **SEVEN),
    "deconv": lambda: qnn.QuantConvTranspose1d(4, 5, 3, **ACROSS),
    "max_pool": lambda: qnn.QuantMaxPool1d(2),
    "avg_pool": lambda: qnn.QuantAvgPool1d(2),
    "adaptive": lambda: qnn.QuantAdaptiveAvgPool1d(1),
    "batch_norm": lambda: qnn.QuantBatchNorm1d(4),
}
VOLUMES = {
    "conv": lambda: qnn.QuantConv3d(4, 6, 3, padding=1, **SEVEN),
    "deconv": lambda: qnn.QuantConvTranspose3d(4, 5, 2, stride=2, **ACROSS),
    "max_pool": lambda: qnn.QuantMaxPool3d(2),
    "avg_pool": lambda: qnn.QuantAvgPool3d(2),
    "adaptive": lambda: qnn.QuantAdaptiveAvgPool3d(1),
}


class Many(nn.Module):
    """Gives the results of many modules on one input."""

    def __init__(self, builders: dict) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: build() for name, build in builders.items()})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part in self.parts.values())


@pytest.mark.parametrize(
    ("builders", "shape"),
    [(IMAGES, (2, 4, 8, 8)), (LINES, (2, 4, 12)), (VOLUMES, (2, 4, 4, 4, 4))],
    ids=["images", "lines", "volumes"],
)
def test_modules_compute_the_same_in_onnxruntime(builders: dict, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = bw.calibrate(bw.prepare(Many(builders).eval(), x), [x])
    file = bw.export(model, tmp_path / "many.onnx")
    with torch.no_grad():
        expected = model(x)
    got = bw.run_file(file)(x)
    step = float(x.abs().max()) / 127
    for name, ours, theirs in zip(builders, expected, got, strict=True):
        gap = float((ours - theirs).abs().max())
        assert gap <= 0.02 * step, f"{name}: off by {gap / step:.3f} steps"
