"""Random nets: every operator argument is honoured in the file, in both runtimes, from the example to the proof."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright as bw
from bitwright.errors import ExportError
from bitwright.quantizer import quantizers
from tests.zoo.random_nets import FAMILIES, proving, random_net

RUNTIMES = ["onnxruntime", "openvino"]
SEEDS = [(family, seed) for family in FAMILIES for seed in range(4 if family == "images" else 2)]


def prove(net: nn.Module, x: Tensor, runtime: str, path: Path) -> None:
    pytest.importorskip(runtime)
    proof, wrong = proving.prove(net.eval(), x, runtime, path)
    if proof is None:
        pytest.skip("nothing of this net runs in integers")
    assert not wrong, (net, wrong)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_a_random_net_is_proven(family: str, seed: int, runtime: str, tmp_path: Path) -> None:
    net, x = random_net(seed, family=family)
    prove(net, x, runtime, tmp_path / "net.onnx")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_net(family: str) -> None:
    (first, x), (second, y) = random_net(7, family=family), random_net(7, family=family)
    assert repr(first) == repr(second)
    assert torch.equal(x, y)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


class Joined(nn.Module):
    """Has a padding mode but no padding after a concatenation: OpenVINO crashed at the second of two quantizers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(11, 2, (1, 3), padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        return self.last(torch.cat([b, a, b], 1))


class Then(nn.Module):
    def __init__(self, then: str) -> None:
        super().__init__()
        self.pool, self.conv, self.then = nn.AvgPool2d(2), nn.Conv2d(1, 2, 3), then

    def forward(self, x: Tensor) -> Tensor:
        if self.then == "average":
            return self.pool(x) * 2.0 + 3.0
        if self.then == "padded":
            return F.pad(self.pool(x), (0, 1), value=1.0)
        if self.then == "split":
            return self.conv(torch.split(x, 4, 2)[0][:, :1])
        return self.conv(x.amax(1, keepdim=True) if self.then == "amax" else x.min(1, keepdim=True)[0])


def test_a_padding_mode_without_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(Joined(), torch.randn(2, 3, 8, 8), "openvino", tmp_path / "net.onnx")


@pytest.mark.parametrize("then", ["average", "padded", "split", "amax", "min"])
def test_what_openvino_rounds_clips_or_refuses(then: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(Then(then), torch.randn(2, 4, 8, 8), "openvino", tmp_path / "net.onnx")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_three_dimensions_without_a_bias(runtime: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(3, 4, 3, (1, 2, 1), 1, (1, 1, 2), bias=False), nn.ReLU())
    prove(net, torch.randn(2, 3, 6, 6, 6), runtime, tmp_path / "net.onnx")


class Shared(nn.Module):
    """Two layers with one weight on one tensor, then a norm that cannot be folded into either."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 3)
        self.b.weight = self.a.weight
        self.norm, self.last = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)
        self.norm.running_var.fill_(9.0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        return self.norm(y), self.last(self.b(x)), self.a(F.relu(y))


def after(step: str, conv: nn.Module) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear, self.last = conv, nn.Linear(8, 3), nn.Conv2d(8, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            joined = torch.cat([y, y.relu()], 1)
            return {
                "clamp": lambda: (self.last(joined), joined.clamp(-0.33, 0.37)),
                "linear": lambda: self.linear(joined),
                "adaptive": lambda: self.last(F.adaptive_max_pool2d(joined, (5, 3)) * 0.5),
                "divisor": lambda: self.last(joined) + F.avg_pool2d(y, 3, 1, divisor_override=2).mean(),
                "free sizes": lambda: (self.last(joined), torch.stack([x, x], 2).flatten(1, 2)),
                "own sizes": lambda: self.last(torch.roll(joined, (1, 2), (2, 3))),
                "extreme": lambda: self.last(F.leaky_relu(joined.amax(2, keepdim=True)).expand(-1, -1, 4, -1)),
            }[step]()

    return Net()


@pytest.mark.parametrize("step", ["clamp", "linear", "adaptive", "divisor", "free sizes", "own sizes", "extreme"])
def test_what_openvino_moves_scales_through(step: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(after(step, nn.Conv2d(3, 4, 1)), torch.randn(2, 3, 8, 8), "openvino", tmp_path / "net.onnx")


class LayerScale(nn.Module):
    """A linear layer on pixels, then constants for each channel and a sum, as in SwiftFormer."""

    def __init__(self, arithmetic: str) -> None:
        super().__init__()
        self.conv, self.linear, self.last = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.Conv2d(8, 2, 1)
        self.constant, self.arithmetic = nn.Parameter(torch.rand(8, 1, 1) + 0.5), arithmetic

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        batch, channels, height, width = y.shape
        pixels = self.linear(y.permute(0, 2, 3, 1).reshape(batch, height * width, channels))
        z = pixels.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        return self.last(y + (self.constant * z if self.arithmetic == "product" else self.constant + z))


@pytest.mark.parametrize("arithmetic", ["product", "sum"])
def test_constants_for_channels_after_computed_sizes(arithmetic: str, tmp_path: Path) -> None:
    """OpenVINO (2026.4) took the first channel's constant for all: 57 and 88 steps off."""
    torch.manual_seed(0)
    prove(LayerScale(arithmetic), torch.randn(2, 3, 6, 6), "openvino", tmp_path / "net.onnx")


@pytest.mark.parametrize(
    "settings", [{"kernel_size": 1, "stride": 2, "padding": 1}, {"kernel_size": 2, "padding": 2}, {"kernel_size": 1}]
)
def test_padding_that_openvino_gets_wrong(settings: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, **settings), nn.ReLU(), nn.Conv2d(4, 2, 3))
    prove(net, torch.randn(2, 3, 7, 8), "openvino", tmp_path / "net.onnx")
    entries = bw.plan(net, None, torch.randn(2, 3, 7, 8), backend="openvino").entries
    assert ("OpenVINO" in entries[0].reason) == ("padding" in settings)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 4, (2, 1), padding="same", dilation=2), (2, 3, 1, 4)),
        (nn.Conv3d(1, 2, 3, padding=1), (2, 1, 1, 4, 4)),
        (nn.Conv3d(1, 2, 3, padding="same"), (2, 1, 1, 1, 1)),
    ],
)
def test_padding_that_openvino_misreads(layer: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    after = nn.Conv2d(4, 3, 1) if len(shape) == 4 else nn.Conv3d(2, 1, 1)
    net, x = nn.Sequential(nn.LeakyReLU(0.5), layer, after), torch.randn(shape)
    prove(net, x, "openvino", tmp_path / "net.onnx")
    reasons = {entry.name: entry.reason for entry in bw.plan(net, None, x, backend="openvino").entries}
    assert reasons["1"].startswith("OpenVINO convolves")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_layers_with_one_weight(runtime: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(Shared(), torch.randn(2, 4, 8, 8), runtime, tmp_path / "net.onnx")


def test_a_linear_layer_before_upsampling(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 5, bias=False), nn.Upsample(scale_factor=2.0))
    prove(net, torch.randn(2, 3, 8, 8), "openvino", tmp_path / "net.onnx")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_more_samples_than_channels(size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv1d(3, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool1d(size)), torch.randn(2, 3, 8)
    prove(net, x, "openvino", tmp_path / "net.onnx")
    reasons = {entry.name: entry.reason for entry in bw.plan(net, None, x, backend="openvino").entries}
    assert ("more samples than channels" in reasons["2"]) == (size != 2)


class Largest(nn.Module):
    """A call with two results, only one of them read, on a tensor that is quantized for a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.attention(x, x, x)[0]
        return y.max(1).values, self.last(y)


def test_a_largest_value_of_more_samples_than_places(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(Largest(), torch.randn(2, 6, 8), "openvino", tmp_path / "net.onnx")


class Writing(nn.Module):
    """Writes into its input, by way of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return y, F.silu(x.flatten(1), inplace=True)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_each_run_gets_the_inputs_as_they_were(runtime: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = bw.calibrate(bw.prepare(Writing().eval(), x.clone(), backend=runtime), [x.clone()])
    file, data = bw.export(model, tmp_path / "net.onnx"), [x.clone(), x.clone()]
    assert bw.verify(model, file, data, runtimes=[runtime], latency=False).ok
    assert all(torch.equal(each, x) for each in data)


@pytest.mark.parametrize("then", [nn.AdaptiveAvgPool1d(1), nn.LayerNorm(6), nn.GroupNorm(1, 1)])
def test_a_single_channel_without_a_bias(then: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(nn.Sequential(nn.Conv1d(3, 1, 1, bias=False), then), torch.randn(2, 3, 6), "openvino", tmp_path / "net.onnx")


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.maximum(x, x)] * 2, 1)


@pytest.mark.parametrize("what", ["a bias", "sizes"])
def test_what_openvino_loses_or_refuses(what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    narrow = [nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, 3), nn.Conv2d(2, 2, 1)]
    pooled = [nn.Linear(6, 5, bias=False), nn.MaxPool3d(3, 2, 1), Twice()]
    layers, shape = (narrow, (2, 3, 4, 4)) if what == "a bias" else (pooled, (2, 1, 5, 6, 6))
    prove(nn.Sequential(*layers), torch.randn(shape), "openvino", tmp_path / "net.onnx")


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("sizes", [((7,), (3,)), ((6, 9), (3, 2)), ((5, 6, 4), (2, 3, None))])
def test_adaptive_pools_are_written(pool: str, sizes: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    rank = len(sizes[0])
    layers = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    adaptive = getattr(nn, f"Adaptive{pool.capitalize()}Pool{rank}d")
    x = torch.randn(2, 3, *sizes[0])
    model = bw.prepare(nn.Sequential(layers[rank](3, 4, 1), adaptive(sizes[1])).eval(), x, backend="onnxruntime")
    file = bw.export(bw.calibrate(model, [x]), tmp_path / "net.onnx", quantized=False)
    with torch.no_grad():
        model.eval()
        for quantizer in quantizers(model).values():
            quantizer.off()
        torch.testing.assert_close(bw.run_file(file, "onnxruntime")(x), model(x))


def test_indices_of_an_adaptive_pool_are_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveMaxPool2d(2, return_indices=True))
    x = torch.randn(2, 3, 6, 6)
    model = bw.calibrate(bw.prepare(net.eval(), x, backend="onnxruntime"), [x])
    with pytest.raises(ExportError, match="indices of an adaptive pool"):
        bw.export(model, tmp_path / "net.onnx")
