"""An ONNX file with integer operators (QLinearConv, QGemm, …), converted by onnxruntime from Q/DQ, and back."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bitwright.errors import ExportError, VerifyError, useful_line
from bitwright.exporting.onnx.external import shipped
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.files import scratch_folder

_EXTERNAL = "session.optimized_model_external_initializers_file_name"
TRANSPOSED = "bitwright.transposed"  # in the metadata: weights stored transposed under another name


def join_quantizers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Make onnxruntime fuse operators with their quantizers, independently of the CPU (its extended level)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with scratch_folder(tempfile.gettempdir()) as folder:
        saved = folder / "joined.onnx"
        options.optimized_model_filepath = str(saved)
        parts = shipped(proto)
        for name, content in parts.items():
            (folder / name).write_bytes(content)
        if len(parts) > 1:
            options.add_session_config_entry(_EXTERNAL, f"{saved.name}.data")
        try:
            main = str(folder / next(iter(parts)))
            onnxruntime.InferenceSession(main, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            why = useful_line(error)
            raise ExportError(f"onnxruntime cannot fuse this model's operators with their quantizers: {why}") from error
        joined = onnx.load(saved)
    used = {node.domain for node in joined.graph.node} | {""}
    kept = [entry for entry in joined.opset_import if entry.domain in used]
    del joined.opset_import[:]
    joined.opset_import.extend(kept)
    joined.metadata_props.add(key=TRANSPOSED, value=json.dumps(_transposed(proto, joined)))
    return joined


def _transposed(before: onnx.ModelProto, after: onnx.ModelProto) -> dict[str, str]:
    """The matrices of the first model that the second has transposed under another name."""
    known = {i.name for i in before.graph.initializer}
    stored = {i.name for i in after.graph.initializer}
    new = {i.name: numpy_helper.to_array(i) for i in after.graph.initializer if i.name not in known}
    gone = {i.name: i for i in before.graph.initializer if i.name not in stored and len(i.dims) == 2}
    found = {}
    for name, tensor in gone.items():
        array = numpy_helper.to_array(tensor).T
        same = (n for n, a in new.items() if a.dtype == array.dtype and np.array_equal(a, array))
        if (match := next(same, None)) is not None:
            found[name] = match
    return found


class QOperatorFile(OnnxFile):
    """A file of integer operators; its float twin and its work are those of the original operators."""

    format = "qoperator"

    @property
    def _moved(self) -> dict[str, str]:
        metadata = {entry.key: entry.value for entry in self.proto.metadata_props}
        return json.loads(metadata.get(TRANSPOSED, "{}"))

    def constant(self, tensor: str) -> np.ndarray | None:
        """The values of an initializer, in the model's layout."""
        moved = self._moved.get(tensor)
        if moved is None:
            return super().constant(tensor)
        found = super().constant(moved)
        return None if found is None else found.T

    def with_quantizers(self) -> onnx.ModelProto:
        try:
            return split_quantizers(self.proto)
        except (IndexError, KeyError) as error:
            raise VerifyError(
                f"{str(self.path)!r} has an integer operator that lacks an input: export again"
            ) from error

    def float_twin(self) -> OnnxFile:
        return OnnxFile(self.path, self.with_quantizers(), None).float_twin()

    def multiply_adds(self, feeds: Mapping[str, np.ndarray]) -> dict[str, int | None]:
        """Count those of the original operators."""
        return OnnxFile(self.path, self.with_quantizers(), None).multiply_adds(feeds)


def split_quantizers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with each integer operator as dequantizers, a float operator and a quantizer."""
    split = onnx.ModelProto()
    split.CopyFrom(proto)
    nodes = list(split.graph.node)
    del split.graph.node[:]
    values = {i.name: numpy_helper.to_array(i) for i in split.graph.initializer}
    for node in nodes:
        parts = _Parts(node, values)
        _SPLITS.get(node.op_type, _Parts.as_it_is)(parts)
        split.graph.node.extend(parts.nodes)
        split.graph.initializer.extend(parts.constants)
    return split


class _Parts:
    """The parts of one integer operator."""

    def __init__(self, node: onnx.NodeProto, values: Mapping[str, np.ndarray]) -> None:
        self.node, self.values = node, values
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def as_it_is(self) -> None:
        """Keep an operator that is not an integer one."""
        self.nodes.append(self.node)

    def operand(self, tensor: int, scale: int, point: int, axis: int = 0) -> str:
        """Dequantize an input, given by the positions of its parts; return the name of the result."""
        names = [self.node.input[i] for i in (tensor, scale, point)]
        made = f"{self.node.name}/{tensor}"
        along: dict[str, Any] = {"axis": axis} if self.values.get(names[1], np.zeros(())).ndim else {}
        self.nodes.append(helper.make_node("DequantizeLinear", names, [made], f"{made}/dequantize", **along))
        return made

    def bias(self, position: int, x_scale: int, w_scale: int) -> list[str]:
        """Dequantize an int32 bias, if there is one."""
        if len(self.node.input) <= position or not self.node.input[position]:
            return []
        made, scale = f"{self.node.name}/bias", f"{self.node.name}/bias/scale"
        step = self.values[self.node.input[x_scale]] * self.values[self.node.input[w_scale]]
        self.constants.append(numpy_helper.from_array(step.astype(np.float32), scale))
        inputs = [self.node.input[position], scale]
        along: dict[str, Any] = {"axis": 0} if step.ndim else {}
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [made], f"{made}/dequantize", **along))
        return [made]

    def compute(self, kind: str, inputs: Sequence[str], scale: int = -1, *, leave_out: Sequence[str] = ()) -> None:
        """Add the float operator, and the quantizer whose scale and zero point start at ``scale``, if it has one."""
        node = self.node
        free = scale < 0 or len(node.input) <= scale
        made = node.output[0] if free else f"{node.name}/float"
        operator = helper.make_node(kind, inputs, [made], node.name)
        operator.attribute.extend(a for a in node.attribute if a.name not in leave_out)
        self.nodes.append(operator)
        if not free:
            operands = [made, node.input[scale], node.input[scale + 1]]
            self.nodes.append(helper.make_node("QuantizeLinear", operands, [node.output[0]], f"{node.name}/quantize"))


def _conv(parts: _Parts) -> None:
    parts.compute("Conv", [parts.operand(0, 1, 2), parts.operand(3, 4, 5), *parts.bias(8, 1, 4)], 6)


def _gemm(parts: _Parts) -> None:
    transposed = any(a.name == "transB" and a.i for a in parts.node.attribute)
    weight = parts.operand(3, 4, 5, axis=0 if transposed else 1)
    parts.compute("Gemm", [parts.operand(0, 1, 2), weight, *parts.bias(6, 1, 4)], 7)


def _matmul(parts: _Parts) -> None:
    parts.compute("MatMul", [parts.operand(0, 1, 2), parts.operand(3, 4, 5, axis=1)], 6)


def _matmul_to_float(parts: _Parts) -> None:
    node, bias = parts.node, list(parts.node.input[6:7])
    product = [parts.operand(0, 2, 4), parts.operand(1, 3, 5, axis=1)]
    if not bias:
        parts.compute("MatMul", product)
        return
    parts.nodes.append(helper.make_node("MatMul", product, [f"{node.name}/product"], node.name))
    parts.nodes.append(helper.make_node("Add", [f"{node.name}/product", *bias], [node.output[0]], f"{node.name}/add"))


def _pair(kind: str) -> Callable[[_Parts], None]:
    return lambda parts: parts.compute(kind, [parts.operand(0, 1, 2), parts.operand(3, 4, 5)], 6)


def _single(kind: str) -> Callable[[_Parts], None]:
    return lambda parts: parts.compute(kind, [parts.operand(0, 1, 2)], 3, leave_out=("channels_last",))


def _concat(parts: _Parts) -> None:
    operands = [parts.operand(i, i + 1, i + 2) for i in range(2, len(parts.node.input), 3)]
    parts.compute("Concat", operands, 0)


_SPLITS: dict[str, Callable[[Any], None]] = {
    "QLinearConv": _conv,
    "QGemm": _gemm,
    "QLinearMatMul": _matmul,
    "MatMulIntegerToFloat": _matmul_to_float,
    "QLinearConcat": _concat,
    **{f"QLinear{kind}": _pair(kind) for kind in ("Add", "Mul")},
    **{f"QLinear{kind}": _single(kind) for kind in ("AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu")},
}
