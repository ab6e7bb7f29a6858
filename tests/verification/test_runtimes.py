"""Runtimes: opened as a user opens them, in float32 for comparison, and watched without being changed."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification import RUNTIMES
from bitwright.verification.proof import RuntimeProof


class Pools(nn.Module):
    """A pool and a reshape that carry a scale: onnxruntime broke such files when it repeated their quantizers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.max_pool2d(torch.relu(self.conv(x)), 2).flatten(1))


def opened_by_a_user(file: Path, x: torch.Tensor) -> np.ndarray:
    """What ``onnxruntime.InferenceSession(path)`` gives, with no options at all."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file))
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize("backend", ["qdq", "tensorrt", "onnxruntime", "openvino"])
@pytest.mark.parametrize("net", ["flatten and linear", "pools"])
def test_files_load_in_a_default_session(tmp_path: Path, backend: str, net: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4)) if net == "flatten and linear" else Pools()
    qmodel = bw.calibrate(bw.prepare(model.eval(), x, backend), [x])
    file = bw.export(qmodel, tmp_path / "default.onnx")
    with torch.no_grad():
        expected = qmodel(x).numpy()
    assert np.abs(opened_by_a_user(file.path, x) - expected).max() <= 1e-4 * np.abs(expected).max()
    proof = bw.verify(qmodel, file, [x], runtimes=["onnxruntime"], latency=False)
    assert proof.ok is True
    assert proof.runtimes["onnxruntime"].settings == {}


@pytest.mark.parametrize("activation", ["e4m3", "e5m2"])
@pytest.mark.parametrize("weight", ["e4m3 channel:0", "int8 channel:0"])
def test_fp8_files_load_in_a_default_session(tmp_path: Path, activation: str, weight: str) -> None:
    """Onnxruntime makes integer operators of fp8 between quantizers, and then refuses them."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    qmodel = bw.calibrate(bw.prepare(Pools().eval(), x, "virtual", weight=weight, activation=activation), [x])
    file = bw.export(qmodel, tmp_path / "fp8.onnx")
    with torch.no_grad():
        expected = qmodel(x).numpy()
    assert np.abs(opened_by_a_user(file.path, x) - expected).max() <= 1e-4 * np.abs(expected).max()
    proof = bw.verify(qmodel, file, [x], runtimes=["onnxruntime"], latency=False)
    assert proof.ok is True
    assert all(t.values for t in proof.runtimes["onnxruntime"].tensors if t.kind == "activation")


def test_files_have_the_lowest_opset_that_says_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 32)
    net = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    for wishes, opset in (
        ({"backend": "onnxruntime"}, 18),
        ({"backend": "qdq"}, 18),
        ({"backend": "virtual", "recipe": "W4A4"}, 18),
        ({"backend": "virtual", "weight": "int8 group:8:1", "activation": "int8"}, 21),
    ):
        qmodel = bw.calibrate(bw.prepare(net, x, **wishes), [x])
        file = bw.export(qmodel, tmp_path / "opset.onnx")
        assert [o.version for o in onnx.load(file).opset_import] == [opset]
        assert bw.verify(qmodel, file, [x], runtimes=["onnxruntime"], latency=False).ok is True


def test_openvino_compares_in_float32_and_times_its_default_apart(cases, monkeypatch) -> None:
    model, file, x = cases["openvino", "residual"]
    runtime = RUNTIMES.get("openvino")
    opened = []
    monkeypatch.setattr(runtime, "isolated", False)  # here, where the test sees it
    original = runtime._compile
    monkeypatch.setattr(
        runtime, "_compile", lambda self, file, given, n: opened.append(dict(given)) or original(self, file, given, n)
    )
    monkeypatch.setattr(runtime, "default_precision", lambda self: "bf16")
    proof = bw.verify(model, file, [x], runtimes=["openvino"])
    found = proof.runtimes["openvino"]
    assert found.settings == {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    as_is = [given for given in opened if "INFERENCE_PRECISION_HINT" not in given]
    assert len(as_is) == 3  # the file, run once beside the settings, then timed with its float twin
    assert all(given.get("INFERENCE_PRECISION_HINT") == "f32" for given in opened if given not in as_is)
    assert found.latency.default_precision == "bf16"
    assert found.latency.default_speedup > 0
    assert "by default, float parts in bf16" in str(proof)


def test_a_default_that_cannot_be_timed_does_not_spoil_the_proof(cases, monkeypatch) -> None:
    model, file, x = cases["openvino", "residual"]
    runtime = RUNTIMES.get("openvino")
    monkeypatch.setattr(runtime, "isolated", False)  # here, where the test sees it
    original = runtime._compile

    def compile_in_float32_only(self, file, given, threads):
        if "INFERENCE_PRECISION_HINT" not in given:
            raise RuntimeError("could not create a primitive descriptor for the softmax")
        return original(self, file, given, threads)

    monkeypatch.setattr(runtime, "_compile", compile_in_float32_only)
    monkeypatch.setattr(runtime, "default_precision", lambda self: "bf16")
    proof = bw.verify(model, file, [x], runtimes=["openvino"])
    latency = proof.runtimes["openvino"].latency
    assert proof.ok is True
    assert latency.speedup > 0
    assert (latency.default_quantized_ms, latency.default_float_ms, latency.default_speedup) == (None, None, None)
    assert "softmax" in latency.default_problem
    assert f"not timed with float parts in bf16, the default: {latency.default_problem}" in str(proof)


def test_a_cpu_with_float32_by_default_is_timed_once(cases, monkeypatch) -> None:
    model, file, x = cases["openvino", "residual"]
    monkeypatch.setattr(RUNTIMES.get("openvino"), "default_precision", lambda self: "")
    latency = bw.verify(model, file, [x], runtimes=["openvino"]).runtimes["openvino"].latency
    assert (latency.default_precision, latency.default_quantized_ms, latency.default_speedup) == ("", None, None)


def test_default_precision_is_what_openvino_says() -> None:
    import openvino

    core, runtime = openvino.Core(), RUNTIMES.get("openvino")()
    hint = core.get_property("CPU", "INFERENCE_PRECISION_HINT")
    assert runtime.default_precision() in ("", "bf16", "f16")
    assert (runtime.default_precision() == "") == (hint == openvino.Type.f32)


class Sums(nn.Module):
    """A residual sum that OpenVINO computes as part of the convolution before it, without rounding in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.stem(x))
        return self.c(torch.relu(self.b(torch.relu(self.a(y))) + y))


def test_quantizers_that_the_runtime_fuses_away_are_named(tmp_path: Path) -> None:
    """Watched, they would be rounded: what is compared must be what runs."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    model = bw.calibrate(bw.prepare(Sums().eval(), x, "openvino"), [x])
    file = bw.export(model, tmp_path / "sums.onnx")
    runtime = RUNTIMES.get("openvino")()
    executed = runtime.executed(OnnxFile.read(file.path), {"x": x.numpy()})
    fused = [e for e in executed if "add" in e.nodes and "b" in e.nodes]
    proof = bw.verify(model, file, [x], runtimes=["openvino"], latency=False)
    tensors = {t.name: t for t in proof.runtimes["openvino"].tensors}
    if fused:  # on CPUs whose kernels can add in place
        assert tensors["b"].values == 0
        assert tensors["b"].excused
        assert "as part of b, add, and does not round it" in tensors["b"].reason
    else:
        assert tensors["b"].values > 0
    assert tensors["relu_2"].values > 0
    assert proof.ok is True
    assert _local(proof.runtimes["openvino"]) < 1e-5


def _local(proof: RuntimeProof) -> float:
    found = proof.worst_output("local")
    assert found is not None
    return found
