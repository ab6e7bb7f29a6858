"""Models in half and double precision: files compute in float32, and are proven against the model in float32."""

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright as bw
from bitwright.exporting.precision import in_float32


class Text(nn.Module):
    """Embeddings, a norm that computes in float32, a mask of the model's own precision, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(64, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.embed.weight.data[0, 0] = 2.0**-40  # too small for float16
        self.scale = nn.Parameter(torch.rand(16) + 0.5)
        self.register_buffer("table", torch.randn(20, 16))

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        x = self.embed(ids) + self.table[: ids.shape[1]] * weights
        wide = x.to(torch.float32)
        x = self.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        hidden = torch.zeros(ids.shape, dtype=x.dtype).masked_fill(ids == 0, torch.finfo(x.dtype).min)
        x = x + self.down(F.gelu(self.up(x)))
        return x * hidden.exp().unsqueeze(-1)


def made(precision: torch.dtype) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    inputs = torch.randint(0, 64, (2, 7)), torch.rand(2, 7, 1).to(precision)
    return bw.calibrate(bw.prepare(Text().eval().to(precision), inputs), [inputs]), inputs


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float64])
def test_a_file_in_float32_is_proven(precision: torch.dtype, runtime: str, tmp_path: Path) -> None:
    model, (ids, weights) = made(precision)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    file = bw.export(model, tmp_path / "m.onnx", store_half=True)
    more = torch.randint(0, 64, (3, 9)), torch.rand(3, 9, 1)  # data in float32 will do as well
    proof = bw.verify(model, file, [(ids, weights), more], runtimes=[runtime], latency=False)
    assert proof.ok, proof.missed
    name = str(precision).removeprefix("torch.")
    assert any(f"the model computes in {name} and the file in float32" in note for note in proof.notes)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert next(iter(model.parameters())).dtype == precision
    with torch.no_grad():
        expected = in_float32(model)(ids, weights.float())
        near = model(ids, weights)
    got = bw.run_file(file.path, runtime)(ids, weights.float())
    assert got.dtype == torch.float32
    assert float((got - expected).abs().max()) < 0.03
    assert float((near.float() - expected).abs().max()) < 0.1
    kinds = {i.data_type for i in onnx.load(file.path).graph.initializer}
    halves = {torch.bfloat16: onnx.TensorProto.BFLOAT16, torch.float16: onnx.TensorProto.FLOAT16}
    assert kinds & set(halves.values()) == ({halves[precision]} if precision in halves else set())


def test_half_precision_stores_the_same_values_in_less(tmp_path: Path) -> None:
    model, (ids, weights) = made(torch.float16)
    large, small = (bw.export(model, tmp_path / f"{half}.onnx", store_half=half) for half in (False, True))
    saved = large.path.stat().st_size - small.path.stat().st_size
    assert saved > 0.8 * 2 * model.embed.weight.numel()
    results = [bw.run_file(file.path)(ids, weights.float()) for file in (large, small)]
    assert torch.equal(*results)


def test_a_changed_model_in_half_precision_is_refused(tmp_path: Path) -> None:
    model, inputs = made(torch.bfloat16)
    file = bw.export(model, tmp_path / "m.onnx")
    with torch.no_grad():
        model.scale.mul_(2)
    with pytest.raises(bw.errors.VerifyError, match="has changed since it was exported"):
        bw.verify(model, file, [inputs])


def test_casts_between_floats_carry_scales() -> None:
    for precision in (torch.bfloat16, torch.float32):
        model, _ = made(precision)
        assert not any("cast" in str(node.args[0]) for node in model.graph.nodes if "quantized" in node.name)
        assert {e.verdict.value for e in bw.ledger_of(model).entries if e.operator == "cast"} == {"carried"}


class PartlyDouble(nn.Module):
    """A layer, a function or nothing but an activation in float64, behind a convolution in float32."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.conv = what, nn.Conv2d(3, 4, 3)
        if what == "layer":
            self.own: nn.Module | nn.Parameter = nn.Conv2d(4, 4, 1).double()
        elif what == "function":
            self.own = nn.Parameter(torch.randn(4, 4, 1, 1).double())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x)).double()
        if self.what == "activation":
            return F.gelu(x)
        return (self.own(x) if isinstance(self.own, nn.Module) else F.conv2d(x, self.own)).float()


@pytest.mark.parametrize("skip", [(), ("own", "conv2d")])
@pytest.mark.parametrize("what", ["layer", "function"])
def test_layers_in_float64_are_written_in_float32(what: str, skip: tuple[str, ...], tmp_path: Path) -> None:
    """Convolutions in float64 have no kernel in onnxruntime."""
    x = torch.randn(2, 3, 8, 8)
    left = [name for name in skip if (name == "own") == (what == "layer")]
    model = bw.calibrate(bw.prepare(PartlyDouble(what).eval(), x, "onnxruntime", skip=left), [x])
    proof = bw.verify(model, bw.export(model, tmp_path / "m.onnx"), [x], runtimes=["onnxruntime"], latency=False)
    assert proof.ok, proof.missed
    assert any("the model computes in float64 and the file in float32" in note for note in proof.notes)


def test_operator_without_a_kernel_for_float64_is_named(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = bw.calibrate(bw.prepare(PartlyDouble("activation").eval(), x, "onnxruntime"), [x])
    file = bw.export(model, tmp_path / "m.onnx")
    why = r"implementation for Erf.*'gelu.*; it has no kernel for these types: if they are float64, let the model"
    with pytest.raises(bw.errors.VerifyError, match=why):
        bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False)


def test_a_model_converted_after_calibration_takes_batches_in_its_precision(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    model = bw.calibrate(bw.prepare(nn.Linear(8, 4), x), [x]).bfloat16()
    assert bw.verify(
        model, bw.export(model, tmp_path / "m.onnx"), [x.bfloat16()], runtimes="onnxruntime", latency=False
    ).ok
