"""Nets for proofs, and files that were tampered with."""

from collections.abc import Callable
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.exporting import ExportRecord
from bitwright.exporting.onnx.file import RECORD
from bitwright.exporting.onnx.seal import write_sealed


class Residual(nn.Module):
    """One shared ReLU called twice, and an in-place residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.stem(x))
        out = self.conv2(self.relu(self.bn1(self.conv1(x))))
        out += x
        return self.fc(F.adaptive_avg_pool2d(self.relu(out), 1).flatten(1))


class Mixture(nn.Module):
    """Depthwise, transposed, 1d and grouped layers, concatenation, gates and resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Conv2d(4, 8, 3, padding=1, groups=4)
        self.act = nn.Hardswish()
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2)
        self.mix = nn.Conv2d(10, 4, 1)
        self.line = nn.Conv1d(4, 5, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(F.avg_pool2d(self.act(self.depth(x)), 2))
        y = torch.cat([y, F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0)], 1)
        z = self.mix(y)
        z = z * torch.sigmoid(z)
        return F.leaky_relu(self.line(z.flatten(2)), 0.1)


class Attention(nn.Module):
    """Linear layers on sequences, matrix products of two computed tensors, softmax, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


class Several(nn.Module):
    """Two outputs of one shape, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"one": self.a(x), "rest": (self.b(x), self.c(x))}


CASES = {
    "residual": (Residual, (4, 3, 16, 16)),
    "mixture": (Mixture, (4, 4, 16, 16)),
    "attention": (Attention, (4, 10, 16)),
}


def tampered(
    source: Path,
    target: Path,
    change: Callable[[onnx.ModelProto], object],
    record: Callable[[ExportRecord], ExportRecord] = lambda record: record,
) -> Path:
    """A copy of a file with its graph or record changed, and sealed again as if Bitwright had written it so."""
    model = onnx.load(str(source))
    change(model)
    for entry in model.metadata_props:
        if entry.key == RECORD:
            entry.value = record(ExportRecord.from_json(entry.value)).to_json()
    write_sealed(model, target)
    return target
