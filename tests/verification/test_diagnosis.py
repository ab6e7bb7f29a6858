"""Why a runtime deviates: found by trying, on runtimes that each make one mistake."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import bitwright as bw
from bitwright.exporting import ExportedFile
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.exporting.onnx.seal import write_sealed
from bitwright.verification import RUNTIMES, register_runtime
from bitwright.verification.diagnosis import TRIALS
from bitwright.verification.runtimes.base import Session
from bitwright.verification.runtimes.reference import Reference

Mistake = Callable[[onnx.GraphProto], None]


class Net(nn.Module):
    """A convolution with large weights of 8 bits, one in a residual sum, and an average of windows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return nn.functional.avg_pool2d(self.second(y) + y, 2)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, ExportedFile, torch.Tensor]:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 4, 8, 8)
    model = bw.prepare(net, x, "virtual", weight="int8 channel:0", activation="uint16 affine tensor")
    bw.calibrate(model, [x], progress=False)
    return model, bw.export(model, tmp_path_factory.mktemp("file") / "net.onnx"), x


def makers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in graph.node for name in node.output}


def insert(graph: onnx.GraphProto, after: onnx.NodeProto, made: str, *nodes: onnx.NodeProto) -> None:
    """Let what reads a node's result read what new nodes make of it."""
    for node in graph.node:
        node.input[:] = [made if i == after.output[0] else i for i in node.input]
    place = list(graph.node).index(after) + 1
    for node in reversed(nodes):
        graph.node.insert(place, node)


def saturate(graph: onnx.GraphProto) -> None:
    for i in graph.initializer:
        if i.data_type == TensorProto.INT8 and len(i.dims) > 1:
            i.CopyFrom(numpy_helper.from_array(np.clip(numpy_helper.to_array(i), -64, 64), i.name))


def round_biases(graph: onnx.GraphProto) -> None:
    read = {n.input[2] for n in graph.node if n.op_type == "Conv" and len(n.input) > 2}
    for i in graph.initializer:
        if i.name in read:
            i.CopyFrom(numpy_helper.from_array(np.round(numpy_helper.to_array(i), 1), i.name))


def compute_in_bfloat16(graph: onnx.GraphProto) -> None:
    for conv in [n for n in graph.node if n.op_type == "Conv"]:
        for tensor in (*conv.input[:2], conv.output[0]):
            maker = makers(graph)[tensor]
            cast = helper.make_node("Cast", [tensor], [f"{tensor}~"], to=TensorProto.BFLOAT16)
            insert(graph, maker, f"{tensor}~~", cast, helper.make_node("Cast", [f"{tensor}~"], [f"{tensor}~~"], to=1))
        biases = [i for i in graph.initializer if i.name in conv.input[2:]]
        for i in biases:
            i.CopyFrom(numpy_helper.from_array(in_bfloat16(numpy_helper.to_array(i)), i.name))


def in_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.copy()).bfloat16().float().numpy()


def round_sums_twice(graph: onnx.GraphProto) -> None:
    """Round a sum in the steps of its first operand, before its own quantizer does."""
    found = makers(graph)
    for node in [n for n in graph.node if n.op_type == "Add"]:
        steps = list(found[node.input[0]].input[1:])
        integers, values = f"{node.name}/q", f"{node.name}/dq"
        quantize = helper.make_node("QuantizeLinear", [node.output[0], *steps], [integers])
        insert(graph, node, values, quantize, helper.make_node("DequantizeLinear", [integers, *steps], [values]))


def requantize_badly(graph: onnx.GraphProto) -> None:
    """Scale by another number where a convolution, or its ReLU, goes straight to a quantizer."""
    found = makers(graph)
    for node in [n for n in graph.node if n.op_type == "QuantizeLinear"]:
        source = found.get(node.input[0])
        source = found.get(source.input[0]) if source is not None and source.op_type == "Relu" else source
        if source is not None and source.op_type == "Conv":
            change_scale(graph, node, 1.01)


def change_scale(graph: onnx.GraphProto, node: onnx.NodeProto, factor: float) -> None:
    (scale,) = [i for i in graph.initializer if i.name == node.input[1]]
    name = f"{node.name}/other"
    graph.initializer.append(numpy_helper.from_array((numpy_helper.to_array(scale) * factor).astype(np.float32), name))
    node.input[1] = name


def multiply_badly(graph: onnx.GraphProto) -> None:
    """Add to the result of convolutions of quantized tensors."""
    found = makers(graph)
    for conv in [n for n in graph.node if n.op_type == "Conv"]:
        if found[conv.input[0]].op_type == "DequantizeLinear":
            name = f"{conv.name}/more"
            graph.initializer.append(numpy_helper.from_array(np.float32(1.05).reshape(()), name))
            insert(graph, conv, f"{name}d", helper.make_node("Mul", [conv.output[0], name], [f"{name}d"]))


MISTAKES: dict[str, tuple[Mistake, str]] = {
    "saturation": (saturate, "relu"),
    "bias precision": (round_biases, "relu"),
    "bf16": (compute_in_bfloat16, "relu"),
    "double rounding": (round_sums_twice, "add"),
    "re-quantization": (requantize_badly, "relu"),
    "integer arithmetic": (multiply_badly, "relu"),
}


@pytest.mark.parametrize("reason", MISTAKES)
def test_mistake_of_a_runtime_is_found(
    exported: tuple[nn.Module, ExportedFile, torch.Tensor], reason: str, tmp_path: Path
) -> None:
    mistake, where = MISTAKES[reason]
    model, file, x = exported
    name = f"mistaken-{reason}"

    @register_runtime(name)
    class Mistaken(Reference):
        stands_in = False

        def session(self, file: OnnxFile, threads: int = 0, *, as_is: bool = False) -> Session:
            copy = onnx.ModelProto()
            copy.CopyFrom(file.proto)
            mistake(copy.graph)
            return super().session(OnnxFile(file.path, copy, file.record), threads, as_is=as_is)

    Mistaken.name = name
    try:
        proof = bw.verify(model, file, [x], runtimes=[name], latency=False, progress=False)
        found = proof.runtimes[name].diagnosis
        assert proof.ok is False
        assert found is not None
        assert found.reasons == [reason], (found, proof)
        assert (found.alone, found.tensor) == (True, where)
        assert f"likely reason: {reason}: " in str(proof)
        assert proof.to_dict()["runtimes"][name]["diagnosis"]["reasons"] == [reason]
        page = bw.report(model, proof, tmp_path / "report.html").read_text()
        assert f"likely reason: {reason}" in page
    finally:
        RUNTIMES.unregister(name)


def truncate_convolutions(graph: onnx.GraphProto) -> None:
    """Keep three bits of what convolutions make: no rounding to bfloat16 gives the same values."""
    for conv in [n for n in graph.node if n.op_type == "Conv"]:
        name = f"{conv.name}/less"
        graph.initializer.append(numpy_helper.from_array(np.float32(8.0).reshape(()), name))
        nodes = [
            helper.make_node("Mul", [conv.output[0], name], [f"{name}m"]),
            helper.make_node("Floor", [f"{name}m"], [f"{name}f"]),
            helper.make_node("Div", [f"{name}f", name], [f"{name}d"]),
        ]
        insert(graph, conv, f"{name}d", *nodes)


@pytest.mark.parametrize("helps", [True, False])
def test_float_parts_are_the_reason_only_if_float32_helps(
    exported: tuple[nn.Module, ExportedFile, torch.Tensor], helps: bool
) -> None:
    model, file, x = exported

    @register_runtime("less-precise")
    class LessPrecise(Reference):
        stands_in = False
        settings: ClassVar = {}
        float32_settings: ClassVar = {"PRECISION": "f32"}

        def session(self, file: OnnxFile, threads: int = 0, *, as_is: bool = False) -> Session:
            copy = onnx.ModelProto()
            copy.CopyFrom(file.proto)
            if not (helps and self.settings):
                truncate_convolutions(copy.graph)
            return super().session(OnnxFile(file.path, copy, file.record), threads, as_is=as_is)

    LessPrecise.name = "less-precise"
    try:
        proof = bw.verify(model, file, [x], runtimes=["less-precise"], latency=False, progress=False)
        found = proof.runtimes["less-precise"].diagnosis
        assert proof.ok is False
        assert found is not None
        assert "bf16 float parts" in found.tried
        assert ("bf16 float parts" in found.reasons) is helps
        assert LessPrecise().in_float32().in_float32() is None
    finally:
        RUNTIMES.unregister("less-precise")


def test_changed_file_is_named_as_the_reason(
    exported: tuple[nn.Module, ExportedFile, torch.Tensor], tmp_path: Path
) -> None:
    model, file, x = exported
    changed = onnx.load(file.path)
    scale = next(i for i in changed.graph.initializer if i.name == "first.weight.scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(1.5), scale.name))
    write_sealed(changed, tmp_path / "changed.onnx")
    proof = bw.verify(model, tmp_path / "changed.onnx", [x], latency=False, progress=False)
    assert proof.ok is False
    found = proof.runtimes["reference"].diagnosis
    assert (found.reasons, found.tensor, found.alone) == (["file"], "relu", False)
    assert "computes what the file says, which is not what the model computes" in str(proof)


def test_runtime_that_does_not_deviate_needs_no_diagnosis(
    exported: tuple[nn.Module, ExportedFile, torch.Tensor],
) -> None:
    model, file, x = exported
    proof = bw.verify(model, file, [x], latency=False, progress=False)
    assert proof.ok
    assert proof.runtimes["reference"].diagnosis is None
    assert {*MISTAKES, "bf16 float parts"} == set(TRIALS)  # each reason that is tried is shown to be found
