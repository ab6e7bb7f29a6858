"""Convolutional nets for images: residual, mobile, shuffled, parallel, dense, scaled, depthwise, and a U."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.zoo.case import member


def conv_norm(source, width, kernel=1, stride=1, groups=1, act=nn.ReLU):
    layers = [nn.Conv2d(source, width, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(width)]
    return nn.Sequential(*layers, *([act()] if act else []))


class Residual(nn.Module):
    def __init__(self, source, width, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(source, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = conv_norm(source, width, 1, stride, act=None) if stride > 1 or source != width else None

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


@member()
class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in (self.layer1, self.layer2):
            x = stage(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Inverted(nn.Module):
    def __init__(self, source, width, stride, expand, squeeze=False, act=nn.ReLU6):
        super().__init__()
        hidden = source * expand
        self.use_res_connect = stride == 1 and source == width
        self.expand = conv_norm(source, hidden, 1, act=act) if expand != 1 else nn.Identity()
        self.depthwise = conv_norm(hidden, hidden, 3, stride, groups=hidden, act=act)
        self.squeeze = Squeeze(hidden) if squeeze else None
        self.project = conv_norm(hidden, width, 1, act=None)

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        y = y if self.squeeze is None else self.squeeze(y)
        return x + self.project(y) if self.use_res_connect else self.project(y)


class Squeeze(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * self.fc2(F.silu(self.fc1(scale))).sigmoid()


@member()
class MobileNet(nn.Module):
    def __init__(self):
        super().__init__()
        settings = [(1, 8, 1, 1), (4, 12, 2, 2), (4, 16, 1, 2)]
        blocks, width = [conv_norm(3, 8, 3, 2, act=nn.ReLU6)], 8
        for expand, out, count, stride in settings:
            for i in range(count):
                blocks.append(Inverted(width, out, stride if i == 0 else 1, expand))
                width = out
        self.features = nn.Sequential(*blocks, conv_norm(width, 32, 1, act=nn.ReLU6))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))


@member()
class EfficientNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv_norm(3, 8, 3, 2, act=nn.SiLU)
        self.blocks = nn.Sequential(
            OrderedDict(
                first=Inverted(8, 8, 1, 2, squeeze=True, act=nn.SiLU), second=Inverted(8, 16, 2, 4, True, nn.SiLU)
            )
        )
        self.head, self.fc = conv_norm(16, 32, 1, act=nn.SiLU), nn.Linear(32, 10)
        self.drop_rate = 0.2

    def forward(self, x):
        x = self.head(self.blocks(self.stem(x)))
        x = F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1)
        return self.fc(F.dropout(x, self.drop_rate, training=self.training))


def channel_shuffle(x, groups):
    batch, channels, height, width = x.size()
    x = x.view(batch, groups, channels // groups, height, width)
    return torch.transpose(x, 1, 2).contiguous().view(batch, channels, height, width)


class Shuffled(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.stride, half = stride, width // 2
        source = half if stride == 1 else width // 2
        self.branch1 = nn.Identity()
        if stride > 1:
            self.branch1 = nn.Sequential(conv_norm(source, source, 3, 2, source, None), conv_norm(source, half))
        self.branch2 = nn.Sequential(
            conv_norm(source, half), conv_norm(half, half, 3, stride, half, None), conv_norm(half, half)
        )

    def forward(self, x):
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


@member()
class ShuffleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv_norm(3, 8, 3, 2)
        self.stages = nn.ModuleList([nn.Sequential(Shuffled(16, 2), Shuffled(16, 1)), Shuffled(32, 2)])
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean([2, 3]))


@member()
class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.transform_input = True
        self.stem = conv_norm(3, 8, 3, 2)
        self.branch1, self.branch3 = conv_norm(8, 8), nn.Sequential(conv_norm(8, 4), conv_norm(4, 8, 3))
        self.branch5 = nn.Sequential(conv_norm(8, 4), conv_norm(4, 8, 5))
        self.branch_pool = conv_norm(8, 8)
        self.aux, self.fc = nn.Linear(32, 10), nn.Linear(32, 10)

    def _transform_input(self, x):
        if self.transform_input:
            parts = [
                torch.unsqueeze(x[:, i], 1) * s + m for i, (s, m) in enumerate([(0.4, 0.1), (0.5, 0.0), (0.6, 0.2)])
            ]
            x = torch.cat(parts, 1)
        return x

    def forward(self, x):
        x = self.stem(self._transform_input(x))
        pooled = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        x = torch.cat([self.branch1(x), self.branch3(x), self.branch5(x), pooled], 1)
        x = F.adaptive_avg_pool2d(F.max_pool2d(x, 3, 2, ceil_mode=True), (1, 1)).flatten(1)
        aux = self.aux(x) if self.training else None
        return (self.fc(x), aux) if aux is not None else self.fc(x)


class DenseLayer(nn.Module):
    def __init__(self, source, growth):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(source), nn.Conv2d(source, 2 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(2 * growth), nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)
        self.memory_efficient = True

    def bottleneck(self, *inputs):
        return self.conv1(F.relu(self.norm1(torch.cat(inputs, 1)), inplace=True))

    def forward(self, inputs):
        previous = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        if self.memory_efficient and any(t.requires_grad for t in previous):
            y = torch.utils.checkpoint.checkpoint(self.bottleneck, *previous, use_reentrant=False)
        else:
            y = self.bottleneck(*previous)
        return self.conv2(F.relu(self.norm2(y)))


class DenseBlock(nn.ModuleDict):
    def __init__(self, source, growth, count):
        super().__init__()
        for i in range(count):
            self.add_module(f"denselayer{i + 1}", DenseLayer(source + i * growth, growth))

    def forward(self, x):
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


@member()
class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                conv0=nn.Conv2d(3, 8, 3, 2, 1, bias=False),
                dense1=DenseBlock(8, 4, 3),
                transition=nn.Sequential(nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 12, 1), nn.AvgPool2d(2, 2)),
                dense2=DenseBlock(12, 4, 2),
                norm5=nn.BatchNorm2d(20),
            )
        )
        self.classifier = nn.Linear(20, 10)

    def forward(self, x):
        out = F.relu(self.features(x), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(out, (1, 1)).flatten(1))


class ChannelsLastNorm(nn.LayerNorm):
    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    def __init__(self, width, drop=0.1):
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.5 * torch.ones(width))
        self.drop = drop

    def drop_path(self, x):
        if self.drop == 0.0 or not self.training:
            return x
        keep = 1 - self.drop
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)

    def forward(self, x):
        shortcut = x
        x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        x = self.gamma * self.pwconv2(F.gelu(self.pwconv1(x)))
        return shortcut + self.drop_path(x.permute(0, 3, 1, 2))


@member()
class ConvNext(nn.Module):
    def __init__(self):
        super().__init__()
        self.downsample_layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(3, 8, 4, 4), ChannelsLastNorm(8)),
                nn.Sequential(ChannelsLastNorm(8), nn.Conv2d(8, 16, 2, 2)),
            ]
        )
        self.stages = nn.ModuleList([nn.Sequential(ConvNextBlock(8)), nn.Sequential(*[ConvNextBlock(16)] * 2)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward_features(self, x):
        for i in range(len(self.stages)):
            x = self.stages[i](self.downsample_layers[i](x))
        return self.norm(x.mean([-2, -1]))

    def forward(self, x):
        return self.head(self.forward_features(x))


@member(size=16, other=21)
class UNet(nn.Module):
    """Pads what comes up to the size of what it is joined with, so any size goes."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([self.double(3, 8), self.double(8, 16)])
        self.bottom = self.double(16, 16)
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 16, 2, 2), nn.Upsample(scale_factor=2, mode="nearest")])
        self.join = nn.ModuleList([self.double(32, 16), self.double(24, 8)])
        self.out = nn.Conv2d(8, 2, 1)

    @staticmethod
    def double(source, width):
        return nn.Sequential(conv_norm(source, width, 3), conv_norm(width, width, 3))

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, join, skip in zip(self.up, self.join, skips[::-1], strict=True):
            x = up(x)
            rows, columns = skip.size()[2] - x.size()[2], skip.size()[3] - x.size()[3]
            x = F.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
            x = join(torch.cat([skip, x], dim=1))
        return {"out": self.out(x)}
