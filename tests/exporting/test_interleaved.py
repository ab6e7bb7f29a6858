"""Transposed convolutions for onnxruntime: a convolution whose results are interleaved, with the same values."""

from pathlib import Path
from types import SimpleNamespace

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bitwright as bw
from bitwright.exporting.interleaved import Interleaving

_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@st.composite
def layers(draw: st.DrawFn) -> SimpleNamespace:
    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    rank = number(1, 3)
    stride = tuple(number(1, 3) for _ in range(rank))
    return SimpleNamespace(
        stride=stride,
        dilation=(1,) * rank,
        kernel_size=tuple(number(1, 5) for _ in range(rank)),
        padding=tuple(number(0, 3) for _ in range(rank)),
        output_padding=tuple(number(0, s - 1) for s in stride),
        groups=number(1, 3),
    )


@settings(max_examples=200, deadline=None)
@given(layers(), st.integers(3, 6))
def test_results_are_those_of_the_transposed_convolution(layer: SimpleNamespace, size: int) -> None:
    rank, groups = len(layer.stride), layer.groups
    x = torch.randint(-9, 10, (2, 2 * groups, *[size] * rank)).double()
    weight = torch.randint(-9, 10, (2 * groups, 3, *layer.kernel_size)).double()
    bias = torch.randint(-9, 10, (3 * groups,)).double()
    try:
        settings = (layer.stride, layer.padding, layer.output_padding, groups)
        expected = _TRANSPOSED[rank](x, weight, bias, *settings)
    except RuntimeError:  # the padding takes everything away
        return
    way = Interleaving.of(layer)
    assert way is not None
    assert torch.equal(way.interleave(way.convolve(x, way.split(weight), way.spread(bias))), expected)


def test_others_are_left_as_they_are() -> None:
    assert Interleaving.of(nn.ConvTranspose2d(2, 2, 3, dilation=(1, 2))) is None


class Decoder(nn.Module):
    """Kernels of the stride's size and wider, groups, a layer called twice, and one that is dilated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, bias=False)
        self.wide = nn.ConvTranspose2d(8, 6, 4, 2, 1, groups=2)
        self.twice = nn.ConvTranspose2d(6, 6, 3, padding=1)
        self.odd = nn.ConvTranspose2d(6, 4, 3, dilation=(2, 1))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.up(self.stem(x))))
        x = F.relu6(self.wide(x))
        return self.head(self.odd(self.twice(torch.relu(self.twice(x)))))


@pytest.mark.parametrize("weight", ["int7 symmetric narrow channel:0", "int7 symmetric narrow tensor"])
def test_file_computes_in_integers_what_is_simulated(weight: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 6)
    model = bw.calibrate(bw.prepare(Decoder().eval(), x, "onnxruntime", weight=weight), [x], progress=False)
    file = bw.export(model, tmp_path / "net.onnx")
    proof = bw.verify(model, file, [x, torch.randn(3, 3, 7, 4)], latency=False, progress=False)
    assert proof.ok, proof
    found = proof.runtimes["onnxruntime"]
    assert found.count("conv_transpose2d") == (4, 5)
    assert [(o.name, o.runs_as) for o in found.floats] == [("odd", "ConvTranspose")]
    assert {t.name: (t.largest, t.values) for t in found.tensors if t.kind == "weight"}["wide.weight"] == (
        0,
        8 * 3 * 16,
    )
    kinds = [n.op_type for n in onnx.load(file.path).graph.node]
    assert (kinds.count("Conv"), kinds.count("ConvTranspose")) == (6, 1)
    exact = bw.simulate(model)
    assert {"up", "wide", "twice"} <= exact.exact.keys()
    assert exact.inexact == {"odd": "onnxruntime has no integer transposed convolution"}
    first = onnxruntime.InferenceSession(file.path).run(None, {"x": x.numpy()})[0]
    assert torch.equal(exact(x), torch.from_numpy(first)) or found.largest == 1


def test_weights_of_four_bits_and_int32_biases_hold(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 6)
    model = bw.prepare(Decoder().eval(), x, "onnxruntime", weight="int4 narrow channel:0")
    bw.calibrate(model, [x], progress=False)
    for pack in (False, True):
        file = bw.export(model, tmp_path / f"{pack}.onnx", pack_weights=pack)
        assert bw.verify(model, file, [x], latency=False, progress=False).ok
