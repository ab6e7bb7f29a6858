"""Fp8: by-scale rounding and its gradient, and files that onnxruntime runs to the same numbers."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.numerics.fp8 import BY_NAME, fp8_quantize_dequantize


def grid(name: str) -> torch.Tensor:
    """Every finite number of a format, in order."""
    every = torch.arange(256, dtype=torch.uint8).view(BY_NAME[name].dtype).double()
    return every[every.isfinite()].unique()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("axis", "count"), [(None, 1), (1, 3)])
def test_rounds_to_the_nearest_number_times_the_scale(name: str, axis: int | None, count: int):
    torch.manual_seed(0)
    scale = 2.0 ** torch.randint(-6, 3, (count,)) if axis is not None else torch.tensor(0.25)  # exact to divide by
    spread = scale.view(1, -1, 1) if axis is not None else scale
    wanted = torch.randn(5, 3, 7) * 2.0 ** torch.randint(-8, 8, (5, 3, 7))
    numbers, y = grid(name), fp8_quantize_dequantize(wanted * spread, scale, name, axis, None)
    inside = wanted.double().clamp(numbers[0], numbers[-1])
    best = (inside[..., None] - numbers).abs().min(-1).values
    assert torch.equal((inside - y.double() / spread).abs(), best)


def test_gradient_passes_within_the_range():
    x = torch.tensor([-3.0, -2.0, 0.0, 2.0, 3.0], requires_grad=True)
    fp8_quantize_dequantize(x, torch.tensor(2.0 / 448), "e4m3", None, None).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_file_computes_the_same_fp8_numbers(name: str, tmp_path):
    torch.manual_seed(0)
    backend = ONNXRUNTIME.with_(
        weights={"spec": f"{name} channel:0", "formats": ()},
        activations={"spec": name, "formats": (), "write_unsigned": False},
    )
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)]
    x = torch.randn(4, 3, 8, 8)
    model = bw.calibrate(bw.prepare(nn.Sequential(*layers), x, backend), x)
    path = bw.export(model, tmp_path / "fp8.onnx")
    proof = bw.verify(model, path, x, runtimes=["onnxruntime"], latency=False).runtimes["onnxruntime"]
    assert len({t.name for t in proof.tensors if t.values}) == 6  # three activations, three weights
    assert proof.largest == 0
    assert max(o.relative for o in proof.outputs) < 1e-6
    assert (model(x) - nn.Sequential(*layers).eval()(x)).abs().max() > 1e-3  # it does quantize
