"""Free sizes: what the model takes in other sizes, the file does too; what it fixes is fixed, and why is logged."""

import inspect
import logging
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.graph import Inputs


class Pyramid(nn.Module):
    """Takes any image; what it returns has sizes that depend on the image's."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.Upsample(scale_factor=2)
        self.conv, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.up(torch.relu(self.down(x)))
        y = self.conv(y) + y
        return self.fc(y.mean((2, 3))), y


class Tagger(nn.Module):
    """Takes sequences of any length, with a mask of the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens) * mask.unsqueeze(-1)
        return self.head(torch.relu(self.fc(x)) + x.mean(1, keepdim=True))


class Classifier(nn.Module):
    """Takes images of one size."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(3, 4, 3, padding=1), pool, nn.Linear(4 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.conv(x)).flatten(1))


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20, (batch, length)), torch.ones(batch, length)


def sizes(path: Path) -> list[list[Any]]:
    shapes = (i.type.tensor_type.shape.dim for i in onnx.load(path).graph.input)
    return [[d.dim_param or d.dim_value for d in shape] for shape in shapes]


CASES: dict[str, tuple[nn.Module, Any, Any, list[list[Any]]]] = {
    "images": (Pyramid(), torch.randn(1, 3, 16, 16), torch.randn(3, 3, 20, 32), [["batch", 3, "x_2", "x_3"]]),
    "sequences": (Tagger(), tokens(1, 7), tokens(3, 11), [["batch", "tokens_1"], ["batch", "tokens_1"]]),
    "a flat head": (
        Classifier(nn.MaxPool2d(2)),
        torch.randn(1, 3, 8, 8),
        torch.randn(3, 3, 8, 8),
        [["batch", 3, 8, 8]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_model_leaves_free_is_free_in_the_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x, other, expected = CASES[name]
    model = bw.calibrate(bw.prepare(net.eval(), x), [x, other])
    file = bw.export(model, tmp_path / "net.onnx")
    assert sizes(file.path) == expected
    proof = bw.verify(model, file, [x, other], runtimes=["onnxruntime"], latency=False)
    assert proof.ok, proof.missed


NEEDS_A_SIZE: dict[str, tuple[nn.Module, str]] = {
    "largest": (nn.MaxPool2d(2, ceil_mode=True), "a pool with ceil_mode"),
    "average": (nn.AvgPool2d(2, ceil_mode=True), "a pool with ceil_mode"),
    "along one dimension": (nn.Sequential(nn.Flatten(2), nn.AvgPool1d(2, ceil_mode=True)), "a pool with ceil_mode"),
    "adaptive": (nn.AdaptiveAvgPool2d(3), "an adaptive pool"),
    "nearest": (nn.Upsample(scale_factor=1.3), "interpolation by this factor"),
    "adaptive largest": (nn.AdaptiveMaxPool2d((3, 1)), "an adaptive pool"),
}


@pytest.mark.parametrize("name", NEEDS_A_SIZE)
def test_a_size_that_the_file_cannot_leave_free_is_fixed(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known before the model is exported, which happens once."""
    pool, words = NEEDS_A_SIZE[name]
    x = torch.randn(2, 3, 7, 7)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), pool).eval()
    model = bw.calibrate(bw.prepare(net, x), [x])
    exports: list[Any] = []
    export = torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **more: exports.append(args) or export(*args, **more))
    with caplog.at_level(logging.INFO, "bitwright"):
        file = bw.export(model, tmp_path / "net.onnx")
    assert sizes(file.path) == [["batch", 3, 7, 7]]
    assert f"sizes of 7 are not free: {words} needs a fixed size" in caplog.text
    assert len(exports) == 1


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(3, 1, ceil_mode=True), nn.AdaptiveAvgPool2d(1)])
def test_a_pool_that_needs_no_size_leaves_it_free(pool: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = bw.calibrate(bw.prepare(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), pool).eval(), x), [x])
    assert sizes(bw.export(model, tmp_path / "net.onnx").path) == [["batch", 3, "input_2", "input_3"]]


def test_shapes_as_torch_has_them(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16, 16)
    model = bw.calibrate(bw.prepare(Pyramid().eval(), x), [x])
    file = bw.export(model, tmp_path / "net.onnx", dynamic_shapes={"x": {2: torch.export.Dim("height", min=8)}})
    assert sizes(file.path) == [[2, 3, "height", 16]]
    assert sizes(bw.export(model, tmp_path / "net.onnx", dynamic_shapes=False).path) == [[2, 3, 16, 16]]


class Starred(nn.Module):
    """Takes arguments without names of their own, and names without a place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, *images: Tensor, **more: Tensor) -> Tensor:
        y = self.last(torch.relu(self.first(images[0]))) * images[1].mean()
        return y + more["shift"].mean() if more else y


@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize("shapes", [True, {"images_0": {0: "n", 2: "h"}, "images_1": {0: "n"}, "shift": {0: "m"}}])
def test_starred_arguments(tmp_path, format, shapes):
    torch.manual_seed(0)
    batch = Inputs((torch.randn(2, 3, 9, 8), torch.randn(2, 5)), {"shift": torch.randn(7)})
    other = Inputs((torch.randn(4, 3, 12, 8), torch.randn(4, 5)), {"shift": torch.randn(2)})
    model = bw.calibrate(bw.prepare(Starred().eval(), batch), [batch], progress=False)
    path = tmp_path / ("net.onnx" if format == "onnx" else "net.pt2")
    bw.export(model, path, format=format, dynamic_shapes=shapes)
    proof = bw.verify(model, path, [batch, other], latency=False, progress=False)
    assert proof.ok, proof.missed
    if format == "onnx":
        wanted = [["batch", 3, "images_0_2", "images_0_3"], ["images_1_0", "images_1_1"], ["shift_0"]]
        assert sizes(path) == (wanted if shapes is True else [["n", 3, "h", 8], ["n", 5], ["m"]])
    assert list(inspect.signature(model.forward).parameters) == ["images", "more"]


def test_starred_arguments_of_a_model_without_a_graph(tmp_path):
    batch, other = ((torch.randn(n, 3, 9, 8), torch.randn(n, 5)) for n in (2, 4))
    net = Starred().eval()
    net.code = nn.Identity()
    with pytest.warns(UserWarning, match="'code' has a name that torch.fx needs"):
        model = bw.prepare(net, batch)
    bw.calibrate(model, [batch], progress=False)
    path = tmp_path / "net.onnx"
    bw.export(model, path)
    assert sizes(path)[0][0] == "batch"
    assert bw.verify(model, path, [batch, other], latency=False, progress=False).ok
