"""A model named as the seed's, the seed's config, and what the tests of MQBench's names share."""

import copy
import operator

import torch
import torch.nn.functional as F
from torch import nn

import bitwright.compat.mqbench.nn as qnn
from bitwright.compat.mqbench import (
    ConvBNReLUFusion,
    enable_calibration,
    enable_quantization,
    fuse_linear_bn,
    prepare_by_platform,
)
from bitwright.preparation import ledger_of
from bitwright.quantizer import quantizers

SEED = {
    "extra_qconfig_dict": {
        "w_observer": "MSEObserver",
        "a_observer": "MSEObserver",
        "w_fakequantize": "FixedFakeQuantize",
        "a_fakequantize": "FixedFakeQuantize",
        "w_qscheme": {"bit": 8, "symmetry": False, "per_channel": True, "pot_scale": False},
        "a_qscheme": {"bit": 8, "symmetry": False, "per_channel": True, "pot_scale": False},
    },
    "extra_quantizer_dict": {
        "additional_function_type": [operator.add],
        "additional_module_type": (torch.nn.Upsample),
        "additional_node_name": ["layer1_1_conv1"],
        "exclude_module_name": ["layer2.1.relu"],
        "exclude_function_type": [operator.mul],
        "exclude_node_name": ["layer1_1_conv1"],
    },
    "preserve_attr": {"": ["func1"], "backbone": ["func2"]},
    "extra_fuse_dict": {
        "additional_fuser_method_mapping": {(torch.nn.Linear, torch.nn.BatchNorm1d): fuse_linear_bn},
        "additional_fusion_pattern": {(torch.nn.BatchNorm1d, torch.nn.Linear): ConvBNReLUFusion},
        "additional_qat_module_mapping": {nn.ConvTranspose2d: qnn.qat.ConvTranspose2d},
    },
    "concrect_args": {},
}
ACADEMIC = {
    "extra_qconfig_dict": {
        "w_qscheme": {"bit": 4, "symmetry": True, "per_channel": True},
        "a_qscheme": {"bit": 4, "symmetry": False},
    }
}


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.relu(self.conv2(self.relu(self.bn1(self.conv1(x)))) + x)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        return self.func2(self.stem(x))

    def func2(self, x):
        return F.relu(x)


class Net(nn.Module):
    """Named as the seed's ResNet, with an upsampling, a gate, a transposed convolution, and a normed linear layer."""

    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.layer1 = nn.Sequential(Block(8), Block(8))
        self.layer2 = nn.Sequential(Block(8), Block(8))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.deconv = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.fc = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        y = self.layer2(self.layer1(self.backbone(x)))
        y = self.deconv(self.up(y)) * 0.5
        y = y * torch.sigmoid(y)
        return self.norm(self.fc(y.mean((2, 3))))

    def func1(self):
        return "kept"


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.scale, self.act = nn.Conv2d(3, 4, 3), Scale(3.0), nn.ReLU()
        self.other, self.shared = nn.Conv2d(4, 4, 1), Scale(2.0)

    def forward(self, x):
        y = self.other(self.act(self.scale(self.conv(x))))
        return y + self.shared(y)


def fuse_scale(conv, scale):
    made = copy.deepcopy(conv)
    with torch.no_grad():
        made.weight.mul_(scale.factor)
        made.bias.mul_(scale.factor)
    return made


def prepared(model, x, backend="Academic", **config):
    return prepare_by_platform(model, backend, {**ACADEMIC, **config}, example_inputs=x)


def specs(model):
    return {name: str(q.spec) for name, q in quantizers(model).items()}


def verdicts(model):
    return {e.name: e.verdict.value for e in ledger_of(model).entries}


def calibrated(model, *batches):
    enable_calibration(model)
    for batch in batches:
        model(batch)
    enable_quantization(model)
    return model


def snapshot(model):
    tree = {n: (m, m.training, list(m._forward_hooks)) for n, m in model.named_modules(remove_duplicate=False)}
    return tree, {n: (id(v), v.clone()) for n, v in model.state_dict(keep_vars=True).items()}


def same(before, after):
    return before[0] == after[0] and all(
        before[1][n][0] == i and torch.equal(before[1][n][1], v) for n, (i, v) in after[1].items()
    )


def config(**sections):
    return {**copy.deepcopy(ACADEMIC), **sections}
