"""Verify: the file runs in integers and equals the simulation, and where it does not, that is said."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, UnknownNameError, VerifyError
from bitwright.verification import RUNTIMES, Proof, RuntimeProof, onnx_file
from bitwright.verification.proof import Latency, OperatorCheck, OutputCheck, TensorCheck

Forward = torch.Tensor


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


CASES = {
    "residual": (Residual, (4, 3, 16, 16)),
    "mixture": (Mixture, (4, 4, 16, 16)),
    "attention": (Attention, (4, 10, 16)),
}


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], tuple[nn.Module, Path, torch.Tensor]]:
    """Every case for every backend, exported once."""
    made = {}
    folder = tmp_path_factory.mktemp("verify")
    for backend in ("onnxruntime", "openvino"):
        for name, (build, shape) in CASES.items():
            torch.manual_seed(1)
            x = torch.randn(shape)
            model = bw.calibrate(bw.prepare(build().eval(), x, backend=backend), [x])
            made[backend, name] = (model, bw.export(model, folder / f"{backend}_{name}.onnx"), x)
    return made


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("case", list(CASES))
def test_file_equals_the_simulation_layer_by_layer(cases, backend: str, case: str) -> None:
    model, file, x = cases[backend, case]
    torch.manual_seed(2)
    proof = bw.verify(model, file, [x, torch.randn_like(x)[:2]], runtimes=[backend], latency=False)
    found = proof.runtimes[backend]
    # Sigmoid and softmax are computed differently by runtimes; values that fall on a rounding border may move.
    assert found.equal >= (0.999 if case == "residual" else 0.98)
    assert found.largest <= 1
    assert found.first_deviation is None
    placed = [n for n in model.graph.nodes if n.name.endswith("_quantized") and n.args[0].op != "get_attr"]
    assert [t.name for t in found.tensors] == [n.name.removesuffix("_quantized") for n in placed]
    assert all(t.values > 0 for t in found.tensors)


def test_everything_that_can_runs_in_integers(cases) -> None:
    expected = {
        ("onnxruntime", "residual"): {"conv": (3, 3), "add": (1, 1), "linear": (1, 1)},
        ("onnxruntime", "mixture"): {"conv": (3, 3), "conv_transpose": (0, 1)},
        ("onnxruntime", "attention"): {"linear": (2, 2), "matmul": (2, 2), "add": (1, 1)},
        ("openvino", "residual"): {"conv": (3, 3), "add": (1, 1), "linear": (1, 1)},
    }
    for (backend, case), kinds in expected.items():
        model, file, x = cases[backend, case]
        found = bw.verify(model, file, [x], runtimes=[backend], latency=False).runtimes[backend]
        assert {k: found.count(k) for k in kinds} == kinds, (backend, case)
        assert sum(total for _, total in kinds.values()) == len(found.operators)


def test_float_operator_has_its_reason(cases) -> None:
    model, file, x = cases["onnxruntime", "mixture"]
    found = bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False).runtimes["onnxruntime"]
    (only,) = [o for o in found.operators if not o.integer]
    assert only == OperatorCheck(
        "up", "conv_transpose", False, "ConvTranspose", "onnxruntime has no integer transposed convolution"
    )


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_skipped_layers_stay_float_in_the_runtime(tmp_path: Path, runtime: str) -> None:
    """Onnxruntime would quantize their weights by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(800, 4),
    ).eval()
    x = torch.randn(4, 3, 16, 16)
    qmodel = bw.calibrate(bw.prepare(model, x, backend=runtime, skip=["2"]), [x])
    file = bw.export(qmodel, tmp_path / "skip.onnx")
    found = bw.verify(qmodel, file, [x], runtimes=[runtime], latency=False).runtimes[runtime]
    assert [(o.name, o.reason) for o in found.operators if not o.integer] == [("2", "skipped by the rule '2'")]
    assert found.equal > 0.999
    assert found.largest <= 1


def test_wrong_file_is_found_out(cases, tmp_path: Path) -> None:
    """A file with one weight changed deviates at that layer, and nowhere else."""
    model, file, x = cases["onnxruntime", "residual"]
    broken = onnx.load(str(file))
    weight = next(i for i in broken.graph.initializer if i.name == "conv1.weight.integers")
    changed = onnx.numpy_helper.to_array(weight).copy()
    changed[0] = -changed[0]
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, weight.name))
    onnx.save(broken, str(tmp_path / "broken.onnx"))
    limits = {"largest": 1, "equal": 0.9999, "output": 1e-6, "coverage": 1.0}
    proof = bw.verify(model, tmp_path / "broken.onnx", [x], runtimes=["onnxruntime"], limits=limits, latency=False)
    found = proof.runtimes["onnxruntime"]
    assert found.first_deviation is not None
    assert found.first_deviation.name == "relu_1"  # the sum of conv1 and its ReLU is one tensor
    assert [t.name for t in found.tensors if t.largest > 1] == ["relu_1"]
    assert not proof.ok
    assert len(proof.missed) == 3
    assert any("steps, more than 1" in m for m in proof.missed)


def test_latency_and_size_against_fp32(cases) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    proof = bw.verify(model, file, [x], runtimes=["onnxruntime"], limits={"speedup": 1e6})
    latency = proof.runtimes["onnxruntime"].latency
    assert latency is not None
    assert latency.batch == 1
    assert latency.quantized_ms > 0
    assert latency.speedup == latency.float_ms / latency.quantized_ms
    assert proof.size == file.stat().st_size
    assert any("the speed of FP32, less than" in m for m in proof.missed)


def test_float_twin_is_the_network_without_quantizers(cases) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    twin = onnx_file.float_twin(onnx_file.load(file))
    onnx.checker.check_model(twin)
    assert not {"QuantizeLinear", "DequantizeLinear"} & {n.op_type for n in twin.graph.node}
    got = RUNTIMES.get("onnxruntime")().session(twin)({"x": x.numpy()})
    with torch.no_grad():
        expected = model(x).numpy()
    (name,) = got
    assert np.abs(got[name] - expected).max() < 0.2 * np.abs(expected).max()


def test_both_runtimes_by_default(cases) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    proof = bw.verify(model, file, [x], latency=False)
    assert list(proof.runtimes) == ["onnxruntime", "openvino"]
    data = proof.to_dict()
    assert data["ok"] is True
    assert data["runtimes"]["openvino"]["coverage"] == 1.0
    assert "100% in integers (3/3 conv, 1/1 add, 1/1 linear)" in str(proof)


def test_bad_input(cases, tmp_path: Path) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    with pytest.raises(UnknownNameError, match="unknown limit 'coverge': did you mean 'coverage'"):
        bw.verify(model, file, [x], limits={"coverge": 1.0})
    with pytest.raises(UnknownNameError, match="unknown runtime 'onnxruntim': did you mean 'onnxruntime'"):
        bw.verify(model, file, [x], runtimes=["onnxruntim"])
    with pytest.raises(ConfigError, match="at least one runtime"):
        bw.verify(model, file, [x], runtimes=[])
    with pytest.raises(VerifyError, match="the data to verify with is empty"):
        bw.verify(model, file, [])
    with pytest.raises(VerifyError, match="there is no file"):
        bw.verify(model, tmp_path / "none.onnx", [x])
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    with pytest.raises(VerifyError, match="is not an ONNX file"):
        bw.verify(model, tmp_path / "junk.onnx", [x])
    _, other_file, _ = cases["onnxruntime", "attention"]
    with pytest.raises(VerifyError):
        bw.verify(model, other_file, [x], runtimes=["onnxruntime"])


def test_proof_in_words() -> None:
    runtime = RuntimeProof(
        "demo",
        "1.0",
        outputs=[OutputCheck("y", 0.5, 0.1, 0.25)],
        tensors=[TensorCheck("a", 1, 0.1, 0.5, 100), TensorCheck("b", 3, 0.2, 1.0, 300)],
        operators=[
            OperatorCheck("c", "conv", True, "QConv"),
            OperatorCheck("d", "conv", False, "Conv", "no kernel"),
        ],
        latency=Latency(2.0, 5.0, 1),
    )
    proof = Proof("m.onnx", 1_000_000, 4_000_000, {"demo": runtime}, ["demo: too slow"])
    text = str(proof)
    assert runtime.coverage == 0.5
    assert runtime.equal == 0.875
    assert runtime.largest == 3
    assert "4.0x smaller than FP32" in text
    assert "50% in integers (1/2 conv)" in text
    assert "float: d (conv, runs as Conv): no kernel" in text
    assert "first tensor off by more than one step: b" in text
    assert "2.00 ms, 2.50x the speed of FP32 (5.00 ms)" in text
    assert "MISSED: demo: too slow" in text


def test_flat_softmax_is_right(tmp_path: Path) -> None:
    """Onnxruntime's integer softmax is not, so it must not be used."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 49, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            return torch.softmax(y + y, -1) @ x

    torch.manual_seed(0)
    x = torch.randn(2, 49, 8) * 0.001
    model = bw.calibrate(bw.prepare(Flat().eval(), x), [x])
    file = bw.export(model, tmp_path / "flat.onnx")
    found = bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False).runtimes["onnxruntime"]
    assert "softmax" in [t.name for t in found.tensors]
    assert found.largest <= 1


def test_signed_activations_are_written_unsigned(tmp_path: Path) -> None:
    """The integer kernels of onnxruntime want u8: the integers are shifted, the values are the same."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = bw.calibrate(bw.prepare(Residual().eval(), x, activation="int8"), [x])
    file = bw.export(model, tmp_path / "signed.onnx")
    kinds = {
        onnx.helper.tensor_dtype_to_np_dtype(i.data_type).name
        for i in onnx.load(str(file)).graph.initializer
        if i.name.endswith("/unsigned")
    }
    assert kinds == {"uint8"}
    found = bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False).runtimes["onnxruntime"]
    assert found.count("linear") == (1, 1)
    assert found.equal > 0.999
    assert found.largest <= 1


def test_tensors_of_four_bits_are_compared_too(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    x = torch.randn(16, 8)
    quantized = bw.calibrate(bw.prepare(model, x, "virtual", recipe="W4A4"), x)
    path = bw.export(quantized, tmp_path / "four.onnx")
    proof = bw.verify(quantized, path, x, runtimes=["onnxruntime"], latency=False).runtimes["onnxruntime"]
    assert {t.name: t.values for t in proof.tensors} == {"input_1": 16 * 8, "_1": 16 * 8}
    assert proof.largest == 0
