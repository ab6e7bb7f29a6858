"""The nets of the accuracy benchmark: one of residual blocks, one of inverted residuals with depthwise layers.

Two more stand in for depthwise nets that collapse at 4 bits: ``uneven`` (:func:`make_uneven`), and ``limited``, which
keeps its ReLU6 (:func:`scale_below_limits`).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.shortcut(x))


class InvertedResidual(nn.Module):
    """1x1 to more channels, depthwise 3x3, 1x1 back; around it a shortcut where shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        inner = inputs * expansion
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner)),
            *(nn.ReLU6(), nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.joins = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.joins else self.body(x)


def _stem(channels: int, activation: nn.Module) -> list[nn.Module]:
    return [nn.Conv2d(1, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), activation]


def resnet() -> nn.Module:
    """ResNet-20: three stages of three blocks with 16, 32 and 64 channels at 14, 7 and 4 pixels."""
    blocks, inputs = [], 16
    for outputs in (16, 32, 64):
        for i in range(3):
            blocks.append(Residual(inputs, outputs, 2 if i == 0 and outputs > 16 else 1))
            inputs = outputs
    return nn.Sequential(*_stem(16, nn.ReLU()), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mobilenet() -> nn.Module:
    """MobileNetV2, small: eight inverted residuals with 16 to 64 channels at 14, 7 and 4 pixels."""
    shapes = ((16, 16, 1), (16, 24, 1), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1), (40, 64, 2), (64, 64, 1))
    head = [nn.Conv2d(64, 128, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU6()]
    blocks = [InvertedResidual(*shape) for shape in shapes]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*_stem(16, nn.ReLU6()), *blocks, *head, *pool)


def make_uneven(model: nn.Module, seed: int) -> nn.Module:
    """Scale the channels inside inverted residuals by powers of two from 1/32 to 32, and undo it in the next layer.

    ReLU takes the place of ReLU6, since max(s·x, 0) = s·max(x, 0). The outputs in float stay the same to the bit, but
    one scale for a tensor, or for all inputs of a weight's channel, now covers magnitudes that differ by up to 1024.
    """
    source = torch.Generator().manual_seed(seed)
    for block in (m for m in model.modules() if isinstance(m, InvertedResidual)):
        block.body[2], block.body[5] = nn.ReLU(), nn.ReLU()
        expand, depthwise, project = (block.body[i] for i in (1, 4, 6))
        factors = [2.0 ** torch.randint(-5, 6, expand.weight.shape, generator=source) for _ in range(2)]
        with torch.no_grad():
            for norm, factor in zip((expand, depthwise), factors, strict=True):
                norm.weight *= factor
                norm.bias *= factor
            block.body[3].weight /= factors[0].reshape(-1, 1, 1, 1)
            project.weight /= factors[1].reshape(1, -1, 1, 1)
    return model


def scale_below_limits(model: nn.Module, images: Tensor, seed: int) -> nn.Module:
    """Scale channels that stay below the limit of their ReLU6 by powers of two down to 1/256, and undo it after them.

    The outputs for these images stay the same to the bit. Nets trained on photos have such channels: many that hardly
    respond, beside some that reach 6.
    """
    source = torch.Generator().manual_seed(seed)
    highest: dict[nn.Module, Tensor] = {}

    def look(module: nn.Module, _: tuple[Tensor], result: Tensor) -> None:
        highest[module] = result.amax((0, 2, 3))

    blocks = [m for m in model.modules() if isinstance(m, InvertedResidual)]
    hooks = [block.body[i].register_forward_hook(look) for block in blocks for i in (2, 5)]
    with torch.no_grad():
        model(images)
        for hook in hooks:
            hook.remove()
        for block in blocks:
            for i, shape in ((2, (-1, 1, 1, 1)), (5, (1, -1, 1, 1))):
                norm, most = block.body[i - 1], highest[block.body[i]]
                factor = torch.where(most < 6, 2.0 ** torch.randint(-8, 1, most.shape, generator=source), 1.0)
                norm.weight *= factor
                norm.bias *= factor
                block.body[i + 1].weight /= factor.reshape(shape)
    return model


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "mobilenet": mobilenet,
    "uneven": mobilenet,
    "limited": mobilenet,
}


def predict(model: nn.Module, images: Tensor) -> Tensor:
    """The logits of each image."""
    with torch.no_grad():
        return torch.cat([model(batch) for batch in images.split(500)])
