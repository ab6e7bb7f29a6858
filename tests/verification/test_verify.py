"""Verify: the file runs in integers and equals the simulation, and where it does not, that is said."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, UnknownNameError, VerifyError
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification import DEFAULT, RUNTIMES
from tests.verification.nets import CASES, Residual, tampered


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("case", list(CASES))
def test_file_equals_the_simulation_layer_by_layer(cases, backend: str, case: str) -> None:
    model, file, x = cases[backend, case]
    torch.manual_seed(2)
    proof = bw.verify(model, file, [x, torch.randn_like(x)[:2]], runtimes=[backend], latency=False)
    found = proof.runtimes[backend]
    assert proof.ok is True
    assert proof.limits == DEFAULT
    # Sigmoid and softmax are computed differently by runtimes; values that fall on a rounding border may move.
    assert found.equal >= (0.999 if case == "residual" else 0.98)
    assert found.largest <= 1
    assert found.first_deviation is None
    placed = [n for n in model.graph.nodes if n.name.endswith("_quantized") and n.args[0].op != "get_attr"]
    activations = [t for t in found.tensors if t.kind == "activation"]
    assert [t.name for t in activations] == [n.args[0].name for n in placed]
    assert all(t.values > 0 or t.excused for t in found.tensors)
    weights = [t for t in found.tensors if t.kind == "weight"]
    assert weights
    assert all(t.values > 0 and t.largest == 0 for t in weights)
    assert all(o.local <= 1e-5 for o in found.outputs)


def test_wrong_weight_is_found_out(cases, tmp_path: Path) -> None:
    """A file with one weight changed deviates at that layer, and nowhere else."""
    model, file, x = cases["onnxruntime", "residual"]

    def change(broken: onnx.ModelProto) -> None:
        weight = next(i for i in broken.graph.initializer if i.name == "conv1.weight.integers")
        changed = onnx.numpy_helper.to_array(weight).copy()
        changed[0] = -changed[0]
        weight.CopyFrom(onnx.numpy_helper.from_array(changed, weight.name))

    wrong = tampered(file, tmp_path / "broken.onnx", change)
    limits = {"equal": 0.9999, "output": 1e-6, "coverage": 1.0}
    proof = bw.verify(model, wrong, [x], runtimes=["onnxruntime"], limits=limits, latency=False)
    found = proof.runtimes["onnxruntime"]
    assert [t.name for t in found.tensors if (t.largest or 0) > 1] == ["conv1.weight", "relu_1"]
    assert proof.ok is False
    assert len(proof.missed) == 6
    assert proof.changes == ["the stored tensor conv1.weight.integers differs"]
    assert any("the stored weight conv1.weight has values off by" in m for m in proof.missed)
    assert any("steps, more than 1 (first: conv1.weight)" in m for m in proof.missed)
    assert any("differs by" in m and "one step of noise" in m for m in proof.missed)


def test_latency_and_size_against_fp32(cases) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    proof = bw.verify(model, file, [x], runtimes=["onnxruntime"], limits={"speedup": 1e6})
    latency = proof.runtimes["onnxruntime"].latency
    assert latency is not None
    assert latency.batch == 1
    assert latency.quantized_ms > 0
    assert latency.speedup == latency.float_ms / latency.quantized_ms
    assert latency.default_speedup is None
    assert proof.size == file.stat().st_size
    assert any("the speed of FP32, less than" in m for m in proof.missed)


def test_float_twin_is_the_network_without_quantizers(cases) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    twin = OnnxFile.read(file).float_twin()
    onnx.checker.check_model(twin.proto)
    assert not {"QuantizeLinear", "DequantizeLinear"} & {n.op_type for n in twin.proto.graph.node}
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
    assert data["verdict"] == "verified in onnxruntime and openvino"
    assert data["runtimes"]["openvino"]["coverage"] == 1.0
    assert str(proof).endswith("\nverified in onnxruntime and openvino")


def test_runtime_that_the_file_is_not_made_for_is_a_note(tmp_path: Path) -> None:
    """OpenVINO computes wrong values for quantized concatenations along other axes than channels."""

    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x).flatten(2).transpose(1, 2)
            return torch.cat((self.token.expand(x.shape[0], -1, -1), y), 1)

    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = bw.calibrate(bw.prepare(Joins().eval(), x), [x])
    file = bw.export(model, tmp_path / "joins.onnx")
    proof = bw.verify(model, file, [x], latency=False)
    assert (proof.verdict, list(proof.runtimes)) == ("verified in onnxruntime", ["onnxruntime"])
    assert [n for n in proof.notes if n.startswith("not verified in openvino, which this file was not made for")]
    asked = bw.verify(model, file, [x], latency=False, runtimes=["openvino"])
    assert asked.ok is False
    assert asked.runtimes["openvino"].largest > 1


def test_bad_input(cases, tmp_path: Path) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    with pytest.raises(UnknownNameError, match="unknown limit 'coverge': did you mean 'coverage'"):
        bw.verify(model, file, [x], limits={"coverge": 1.0})
    with pytest.raises(UnknownNameError, match="unknown runtime 'onnxruntim': did you mean 'onnxruntime'"):
        bw.verify(model, file, [x], runtimes=["onnxruntim"])
    with pytest.raises(ConfigError, match="at least one runtime"):
        bw.verify(model, file, [x], runtimes=[])
    with pytest.raises(ConfigError, match="a limit on the speedup needs latency=True"):
        bw.verify(model, file, [x], limits={"speedup": 1.0}, latency=False)
    with pytest.raises(VerifyError, match="the data to verify with is empty"):
        bw.verify(model, file, [])
    with pytest.raises(VerifyError, match="onnxruntime cannot run the file on x float32"):
        bw.verify(model, file, [torch.randn(2, 5, 16, 16)], runtimes=["onnxruntime"])


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
    proof = bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False)
    assert "softmax" in [t.name for t in proof.runtimes["onnxruntime"].compared]
    assert proof.ok is True


def test_signed_activations_are_written_unsigned(tmp_path: Path) -> None:
    """Onnxruntime's integer kernels need u8: the integers are shifted, and the values stay the same."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = bw.calibrate(bw.prepare(Residual().eval(), x, activation="int8"), [x])
    file = bw.export(model, tmp_path / "signed.onnx")
    kinds = {
        onnx.helper.tensor_dtype_to_np_dtype(i.data_type).name
        for i in onnx.load(file).graph.initializer
        if i.name.endswith("/unsigned")
    }
    assert kinds == {"uint8"}
    assert {t.shift for t in file.tensors if t.kind == "activation"} == {128}
    proof = bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False)
    found = proof.runtimes["onnxruntime"]
    assert found.count("linear") == (1, 1)
    assert found.equal > 0.999
    assert proof.ok is True


def test_tensors_of_four_bits_are_compared_too(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    x = torch.randn(16, 8)
    quantized = bw.calibrate(bw.prepare(model, x, "virtual", recipe="W4A4"), x)
    path = bw.export(quantized, tmp_path / "four.onnx")
    fixed = bw.export(quantized, tmp_path / "fixed.onnx", dynamic_shapes=False)
    for file, batches, samples in ((path, [x], 16 + 32), (path, [x, x[:4]], 16 + 4), (fixed, [x], 16)):
        proof = bw.verify(quantized, file, batches, runtimes=["onnxruntime"], latency=False).runtimes["onnxruntime"]
        activations = {t.name: t.values for t in proof.tensors if t.kind == "activation"}
        assert activations == {"input_1": samples * 8, "_1": samples * 8}  # of the batches, and of the first one twice
        assert proof.largest == 0


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_layers_outside_of_any_graph_are_compared_too(tmp_path: Path, runtime: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    model = bw.calibrate(bw.swap_modules(net, quant_desc_weight=bw.QuantDescriptor(7, axis=0), example_inputs=x), [x])
    file = bw.export(model, tmp_path / "swapped.onnx")
    proof = bw.verify(model, file, [x], runtimes=[runtime], latency=False)
    compared = {(t.name, t.kind) for t in proof.runtimes[runtime].compared}
    assert {kind for _, kind in compared} == {"activation", "weight"}
    assert len(compared) == 4
    assert proof.ok is True
