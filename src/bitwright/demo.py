"""The demo (``make demo``): trains a small network on real digits, quantizes it, and proves the result.

The five calls ``bw.…`` in :func:`main` do all the quantizing; the rest trains, evaluates and prints.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright as bw
from bitwright.errors import require
from bitwright.progress import track
from bitwright.reporting.text import count, percent, smaller
from bitwright.verification import run_file

OUTPUT = Path("out/demo")
EPOCHS = 18
BATCH = 64


def conv(inputs: int, outputs: int, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps height and width, BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Residual(nn.Module):
    """relu(x + f(x)), f being two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = conv(width, width)
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.first(x)))


class DigitNet(nn.Module):
    """A bit of everything that image networks are made of: (N, 1, 16, 16) images to (N, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(1, 32)
        self.pool = nn.MaxPool2d(2)
        self.block1 = Residual(32)
        self.depthwise = conv(32, 32, groups=32)
        self.pointwise = conv(32, 96, kernel=1)
        self.block2 = Residual(96)
        self.near = conv(96, 48, kernel=1)
        self.wide = conv(96, 48, kernel=3)
        self.head = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(self.pool(self.stem(x)))  # (N, 32, 8, 8)
        x = self.block2(self.pointwise(self.depthwise(x)))  # (N, 96, 8, 8)
        x = torch.cat([self.near(x), self.wide(x)], dim=1)  # (N, 96, 8, 8)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1797 handwritten digits: images and labels to train with, images and labels to test with."""
    digits = require("sklearn.datasets", "dev", "the demo").load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (1797, 1, 8, 8) in [-1, 1]
    images = F.interpolate(images, scale_factor=2, mode="bilinear")
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1297], order[1297:]
    return images[train], labels[train], images[test], labels[test]


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train with one-cycle SGD on images that are moved by up to two pixels."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    for _ in track(range(EPOCHS), "training"):
        for batch in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
            down, right = torch.randint(-2, 3, (2,)).tolist()
            moved = F.pad(images[batch], (right, -right, down, -down), value=-1.0)
            loss = F.cross_entropy(model(moved), labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def accuracy(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> float:
    """Share of the images that ``model`` (a module, or a file in its runtime) reads correctly."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    """Train, quantize, export, verify and report."""
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help with tensors this small, and hurt on a busy machine
    train_images, train_labels, test_images, test_labels = load_digits()

    print(f"Training a small residual network on {len(train_images)} handwritten digits …")
    model = DigitNet()
    train(model, train_images, train_labels)

    print("Quantizing it …")
    batches = train_images[:512].split(BATCH)
    page = OUTPUT / "report.html"
    qmodel = bw.prepare(model, batches[0], backend="onnxruntime")
    bw.calibrate(qmodel, batches)
    written = bw.export(qmodel, OUTPUT / "model.onnx")

    print("Running the file and comparing it with the simulation …")
    proof = bw.verify(qmodel, written, batches)
    scores = {"FP32": accuracy(model, test_images, test_labels)}
    scores["simulated"] = accuracy(qmodel, test_images, test_labels)
    for runtime in proof.runtimes:
        scores[runtime] = accuracy(run_file(written, runtime), test_images, test_labels)
    bw.report(qmodel, proof, page, batches=batches, accuracy=scores, title="Handwritten digits")

    print(f"\nAccuracy on {len(test_images)} other digits")
    print(f"  FP32 model                 {scores['FP32']:.1%}")
    for runtime, found in proof.runtimes.items():
        print(f"\n{runtime} {found.version}, running {written}")
        print(f"  INT8 accuracy              {scores[runtime]:.1%}")
        integer = sum(o.integer for o in found.operators)
        print(f"  operators in integers      {integer} of {len(found.operators)} ({found.coverage:.0%})")
        print(f"  values as simulated        {percent(found.equal)}, largest gap {count(found.largest or 0, 'step')}")
        if found.latency is not None:
            print(f"  speed                      {found.latency.speedup:.1f} times FP32 in {runtime}")
    print(f"\nSize    {proof.size / 1e3:.0f} kB, {smaller(proof.size, proof.float_size, ' times')} than FP32")
    print(f"Report  {page.resolve()}")
    print(f"Took    {time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
