"""MobileNetV2 (Sandler et al., 2018): inverted residuals, depthwise convolutions, ReLU6."""

import torch
import torch.nn.functional as F
from torch import nn

from ._init import init_weights, last_conv

# (expansion, output channels, blocks, stride of the first block): table 2 of the paper.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class ConvBNReLU6(nn.Sequential):
    """Convolution with "same" padding, BatchNorm, ReLU6."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    """Expand 1x1, filter depthwise 3x3, project 1x1 without activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(ConvBNReLU6(inputs, hidden, kernel=1))
        layers += [
            ConvBNReLU6(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)
        self.use_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_shortcut:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    """Stem, 17 inverted residuals, 1x1 head, average pool, classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        channels = 32
        features: list[nn.Module] = [ConvBNReLU6(3, channels, kernel=3, stride=2)]
        for expansion, outputs, blocks, first_stride in STAGES:
            for index in range(blocks):
                stride = first_stride if index == 0 else 1
                features.append(InvertedResidual(channels, outputs, stride, expansion))
                channels = outputs
        features.append(ConvBNReLU6(channels, 1280, kernel=1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))
        blocks = [block for block in features if isinstance(block, InvertedResidual)]
        init_weights(self, [last_conv(block.conv) for block in blocks if block.use_shortcut])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)  # (B, 3, 224, 224) -> (B, 1280, 7, 7)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        return self.classifier(x)


def mobilenet_v2(num_classes: int = 1000) -> MobileNetV2:
    """Builds MobileNetV2 with random weights (3,504,872 parameters at 1000 classes)."""
    return MobileNetV2(num_classes)
