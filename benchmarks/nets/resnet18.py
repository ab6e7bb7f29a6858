"""ResNet-18 (He et al., 2015): 20 convolutions, 8 residual adds, one linear layer."""

import torch
from torch import nn

from ._init import init_weights


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut; one ReLU module serves both activations."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs))


class ResNet18(nn.Module):
    """Stem, four stages of two blocks, average pool, classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, stride=1)
        self.layer2 = _stage(64, 128, stride=2)
        self.layer3 = _stage(128, 256, stride=2)
        self.layer4 = _stage(256, 512, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, num_classes)
        blocks = [module for module in self.modules() if isinstance(module, BasicBlock)]
        init_weights(self, branch_ends=[block.conv2 for block in blocks])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)  # (B, 3, 224, 224) -> (B, 64, 112, 112)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)  # (B, 64, 56, 56)
        x = self.layer2(x)  # (B, 128, 28, 28)
        x = self.layer3(x)  # (B, 256, 14, 14)
        x = self.layer4(x)  # (B, 512, 7, 7)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


def resnet18(num_classes: int = 1000) -> ResNet18:
    """Builds ResNet-18 with random weights (11,689,512 parameters at 1000 classes)."""
    return ResNet18(num_classes)
