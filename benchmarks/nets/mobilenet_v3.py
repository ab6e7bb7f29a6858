"""MobileNetV3-Small (Howard et al., 2019): hardswish, squeeze-and-excite with hardsigmoid."""

from typing import NamedTuple

import torch
from torch import nn

from ._init import init_weights, last_conv


class Block(NamedTuple):
    """One row of table 2 of the paper."""

    kernel: int
    hidden: int
    outputs: int
    squeeze: bool
    activation: type[nn.ReLU | nn.Hardswish]
    stride: int


BLOCKS = (
    Block(3, 16, 16, True, nn.ReLU, 2),
    Block(3, 72, 24, False, nn.ReLU, 2),
    Block(3, 88, 24, False, nn.ReLU, 1),
    Block(5, 96, 40, True, nn.Hardswish, 2),
    Block(5, 240, 40, True, nn.Hardswish, 1),
    Block(5, 240, 40, True, nn.Hardswish, 1),
    Block(5, 120, 48, True, nn.Hardswish, 1),
    Block(5, 144, 48, True, nn.Hardswish, 1),
    Block(5, 288, 96, True, nn.Hardswish, 2),
    Block(5, 576, 96, True, nn.Hardswish, 1),
    Block(5, 576, 96, True, nn.Hardswish, 1),
)


def _nearest_multiple_of_8(channels: int) -> int:
    """Rounds half up; the paper never goes below 8."""
    return max(8, (channels + 4) // 8 * 8)


class ConvBNActivation(nn.Sequential):
    """Convolution with "same" padding, BatchNorm and, unless None, an activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        activation: type[nn.ReLU | nn.Hardswish] | None,
        stride: int = 1,
        groups: int = 1,
    ) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs, eps=0.001, momentum=0.01),
        ]
        if activation is not None:
            layers.append(activation(inplace=True))
        super().__init__(*layers)


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate in [0, 1] computed from the channel means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _nearest_multiple_of_8(channels // 4)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = nn.ReLU()
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.avgpool(x)  # (B, C, H, W) -> (B, C, 1, 1)
        scale = self.activation(self.fc1(scale))
        scale = self.scale_activation(self.fc2(scale))
        return scale * x


class InvertedResidual(nn.Module):
    """Expand, filter depthwise, optionally squeeze-and-excite, project without activation."""

    def __init__(self, inputs: int, spec: Block) -> None:
        super().__init__()
        hidden, activation = spec.hidden, spec.activation
        layers: list[nn.Module] = []
        if hidden != inputs:
            layers.append(ConvBNActivation(inputs, hidden, 1, activation))
        layers.append(ConvBNActivation(hidden, hidden, spec.kernel, activation, spec.stride, groups=hidden))
        if spec.squeeze:
            layers.append(SqueezeExcite(hidden))
        layers.append(ConvBNActivation(hidden, spec.outputs, 1, None))
        self.block = nn.Sequential(*layers)
        self.use_shortcut = spec.stride == 1 and inputs == spec.outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.block(x)
        if self.use_shortcut:
            result += x
        return result


class MobileNetV3Small(nn.Module):
    """Stem, 11 inverted residuals, 1x1 head, average pool, two-layer classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        channels = 16
        features: list[nn.Module] = [ConvBNActivation(3, channels, 3, nn.Hardswish, stride=2)]
        for spec in BLOCKS:
            features.append(InvertedResidual(channels, spec))
            channels = spec.outputs
        head = 6 * channels
        features.append(ConvBNActivation(channels, head, 1, nn.Hardswish))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(head, 1024),
            nn.Hardswish(inplace=True),
            nn.Dropout(0.2, inplace=True),
            nn.Linear(1024, num_classes),
        )
        blocks = [block for block in features if isinstance(block, InvertedResidual)]
        ends = [last_conv(block.block) for block in blocks if block.use_shortcut]
        init_weights(self, ends, gain=1.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)  # (B, 3, 224, 224) -> (B, 576, 7, 7)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


def mobilenet_v3_small(num_classes: int = 1000) -> MobileNetV3Small:
    """Builds MobileNetV3-Small with random weights (2,542,856 parameters at 1000 classes)."""
    return MobileNetV3Small(num_classes)
