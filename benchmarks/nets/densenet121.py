"""DenseNet-121 (Huang et al., 2016): BatchNorm, ReLU, convolution; every layer sees all before."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from ._init import init_weights

LAYERS = (6, 12, 24, 16)
GROWTH = 32
BOTTLENECK = 4 * GROWTH


class DenseLayer(nn.Module):
    """Squeezes the concatenated features by a 1x1, then makes `GROWTH` new ones by a 3x3."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(BOTTLENECK, GROWTH, 3, padding=1, bias=False)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(features, 1)
        squeezed = self.conv1(self.relu1(self.norm1(joined)))
        return self.conv2(self.relu2(self.norm2(squeezed)))


class DenseBlock(nn.ModuleDict):
    """Layers that each read the block's input and the output of all earlier layers."""

    def __init__(self, inputs: int, layers: int) -> None:
        super().__init__()
        for index in range(layers):
            self[f"denselayer{index + 1}"] = DenseLayer(inputs + index * GROWTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def _transition(channels: int) -> nn.Sequential:
    """Halves the channels and the image size between two blocks."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            norm=nn.BatchNorm2d(channels),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
            pool=nn.AvgPool2d(2, stride=2),
        )
    )


class DenseNet121(nn.Module):
    """Stem, four dense blocks with transitions between them, final norm, classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        channels = 2 * GROWTH
        self.features = nn.Sequential(
            OrderedDict[str, nn.Module](
                conv0=nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
                norm0=nn.BatchNorm2d(channels),
                relu0=nn.ReLU(inplace=True),
                pool0=nn.MaxPool2d(3, stride=2, padding=1),
            )
        )
        for number, layers in enumerate(LAYERS, start=1):
            self.features.add_module(f"denseblock{number}", DenseBlock(channels, layers))
            channels += layers * GROWTH
            if number < len(LAYERS):
                self.features.add_module(f"transition{number}", _transition(channels))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, num_classes)
        init_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.features(x)  # (B, 3, 224, 224) -> (B, 1024, 7, 7)
        out = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        return self.classifier(out)


def densenet121(num_classes: int = 1000) -> DenseNet121:
    """Builds DenseNet-121 with random weights (7,978,856 parameters at 1000 classes)."""
    return DenseNet121(num_classes)
