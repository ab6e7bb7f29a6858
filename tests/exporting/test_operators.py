"""Arguments of operators in files: every branch of a net gives what the simulation does, in both runtimes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright as bw

Branch = Callable[[Tensor], Tensor]


class Branches(nn.Module):
    """Functions of one convolution's result, which may be negative, each followed by a convolution."""

    def __init__(self, branches: list[Branch], rank: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.first, self.branches = conv(3, 4, 1), branches
        self.last = nn.ModuleList(conv(4, 4, 1) for _ in branches)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.first(x)
        return [last(branch(y)) for branch, last in zip(self.branches, self.last, strict=True)]


class TwoReaders(nn.Module):
    """Convolutions without bias, as modules and as a function, whose results have two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.deep = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 4, 3, groups=4, bias=False)
        self.weight = nn.Parameter(torch.randn(4, 4, 1, 1) / 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.conv(x)
        z = self.deep(y)
        w = F.conv2d(z, self.weight)
        return [y, y.relu(), z, z.relu(), w, w.relu()]


class ComputedWeights(nn.Module):
    """Functions whose weights depend on the input: square, so that limits along a wrong axis would fit too."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.wide = nn.Parameter(torch.randn(3, 3, 1, 1)), nn.Parameter(torch.randn(5, 3, 3, 3))
        self.linear = nn.Parameter(torch.randn(6, 6) * torch.arange(1, 7).unsqueeze(1))

    def forward(self, x: Tensor) -> list[Tensor]:
        factor = x.mean().clamp(1.0, 1.1)
        return [F.conv2d(x, self.square * factor), F.conv2d(x, self.wide * factor), F.linear(x, self.linear * factor)]


class Attentions(nn.Module):
    """Attention on tensors of two and three dimensions, with masks and without."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(8, 24)
        self.register_buffer("mask", torch.rand(6, 6) > 0.3)
        self.mask.fill_diagonal_(True)

    def forward(self, x: Tensor) -> list[Tensor]:
        q, k, v = self.parts(x).chunk(3, -1)
        bias = q.mean(-1, keepdim=True)
        return [
            F.scaled_dot_product_attention(q, k, v),
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5),
            F.scaled_dot_product_attention(q, k, v, self.mask),
            F.scaled_dot_product_attention(q, k, v, bias),
            F.scaled_dot_product_attention(q[0], k[0], v[0], bias[0]),
            *self.by_window(q, k, v),
        ]

    def by_window(self, *tensors: Tensor) -> Iterator[Tensor]:
        """Attention on (samples, windows, heads, length, features)."""
        q, k, v = (x.unflatten(1, (2, 3)).unflatten(-1, (2, 4)).transpose(-3, -2) for x in tensors)
        bias = q.mean(-1, keepdim=True)
        yield F.scaled_dot_product_attention(q, k, v, is_causal=True)
        yield F.scaled_dot_product_attention(q, k, v, bias, scale=0.7)
        yield F.scaled_dot_product_attention(q, k[:, :1], v[:, 1:], bias[0])
        yield F.scaled_dot_product_attention(q[:1, :1], k, v, self.mask[:3, :3])


class NormAfterWindows(nn.Module):
    """A float norm after a reshape, one of whose sizes runtimes cannot follow."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, channels, 1), nn.BatchNorm2d(channels)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.2, 2.0)
        self.last = nn.Conv2d(channels, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        batch, channels, height, width = y.shape
        windows = y.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
        z = windows.reshape(batch, channels, 2 * (height // 2), 2 * (width // 2))
        return self.last(self.norm(z).relu())


POOLS: dict[str, tuple[int, list[Branch]]] = {
    "average": (
        2,
        [
            nn.AvgPool2d(3, 2, 1),
            nn.AvgPool2d((3, 2), 2, ceil_mode=True),
            nn.AvgPool2d((3, 2), 2, 1, ceil_mode=True),
            nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
            nn.AvgPool2d(2, 1, divisor_override=3),
            nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=5),
            lambda v: F.avg_pool2d(v, 2, None, 1, True, False),
            lambda v: F.avg_pool2d(v[0], 3, 2, 1, ceil_mode=True),
        ],
    ),
    "largest": (
        2,
        [
            nn.MaxPool2d(2, 2, 1, ceil_mode=True),
            nn.MaxPool2d(3, 2, 1, 2, ceil_mode=True),
            nn.MaxPool2d((2, 3), 2, ceil_mode=True),
            nn.MaxPool2d(2, 2, 1, 2, ceil_mode=True),
            lambda v: F.max_pool2d(v[0], 2, 2, 1, ceil_mode=True),
        ],
    ),
    "sequences": (1, [nn.AvgPool1d(3, 2, 1, ceil_mode=True), nn.MaxPool1d(2, 2, 1, ceil_mode=True)]),
    "volumes": (3, [nn.AvgPool3d(3, 2, 1, True, True, 7), nn.MaxPool3d(2, 2, 1, ceil_mode=True)]),
    "circular": (
        2,
        [
            nn.Conv2d(4, 4, 3, padding=2, padding_mode="circular"),
            lambda v: F.pad(v, (1, 2, 2, 0), mode="circular"),
            lambda v: F.pad(v, (2, -1, 0, 0), mode="circular"),
        ],
    ),
}


def prove(net: nn.Module, x: Tensor, backend: str, path: Path) -> None:
    pytest.importorskip(backend)
    model = bw.calibrate(bw.prepare(net.eval(), x, backend), [x])
    with torch.no_grad():
        simulated = model(x)
    proof = bw.verify(model, bw.export(model, path), [x], runtimes=[backend], latency=False)
    assert proof.ok, proof.missed
    for got, expected in zip(bw.run_file(path, backend)(x), simulated, strict=True):
        assert got.shape == expected.shape
        assert float((got - expected).abs().max()) <= 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", POOLS)
def test_every_argument_is_in_the_file(name: str, backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rank, branches = POOLS[name]
    prove(Branches(branches, rank), torch.randn(2, 3, *(7, 8, 9)[:rank]), backend, tmp_path / "net.onnx")


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("net", [TwoReaders, ComputedWeights])
def test_scales_and_limits_are_applied_once_and_along_their_axis(net: type, backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(net(), torch.randn(2, 3, 8, 6), backend, tmp_path / "net.onnx")


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_attention_of_any_rank_is_in_the_file(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(Attentions(), torch.randn(2, 6, 8), backend, tmp_path / "net.onnx")


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_norms_after_computed_sizes_use_their_own_channels(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    prove(NormAfterWindows(), torch.randn(2, 3, 8, 6), backend, tmp_path / "net.onnx")


class PaddedPools(nn.Module):
    """Pools of largest values over zeros that were padded before, where all values are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        nn.init.constant_(self.first.get_parameter("bias"), -4.0)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.first(x)
        pooled = F.max_pool2d(F.pad(y, (1, 1, 1, 1)), 3, 2)
        rows = F.max_pool1d(F.pad(y.flatten(2), (2, 1)), 3)
        return [F.group_norm(pooled, 2), self.last(pooled), F.max_pool2d(nn.ZeroPad2d(1)(y.tanh() - 2.0), 2), rows]


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_pools_see_zeros_that_were_padded(backend: str, quantized: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = PaddedPools().eval(), torch.randn(2, 3, 8, 6)
    if quantized:
        prove(net, x, backend, tmp_path / "net.onnx")
        return
    pytest.importorskip(backend)
    model = bw.calibrate(bw.prepare(net, x, backend), [x])
    file = bw.export(model, tmp_path / "float.onnx", quantized=False)
    for got, expected in zip(bw.run_file(file, backend)(x), net(x), strict=True):
        assert torch.allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_torchs_and_one_operator_of_onnxruntime(approximate, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate), nn.Linear(16, 4)).eval()
    x = 3 * torch.randn(2, 5, 8)
    model = bw.calibrate(bw.prepare(net, x, "onnxruntime"), [x])
    plain = bw.export(model, tmp_path / "float.onnx", quantized=False)
    with torch.no_grad():
        assert float((bw.run_file(plain)(x) - net(x)).abs().max()) < 1e-6
    file = bw.export(model, tmp_path / "net.onnx")
    proof = bw.verify(model, file, [x], latency=False)
    assert proof.ok, proof.missed
    runs = {o.runs_as for o in proof.runtimes["onnxruntime"].operators}
    assert ("Erf" in runs) is False
    assert bool(runs & {"Gelu", "BiasGelu"}) or approximate == "tanh"
