"""What verify needs to know of an ONNX file: its operators, its quantized tensors, and its FP32 twin."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from bitwright.errors import VerifyError

_MATRIX = {"Gemm", "MatMul"}
WIDE = "/wide"  # ends the name of a tensor that is given out in a wider type
_WIDER: dict[int, int] = {
    onnx.TensorProto.INT4: onnx.TensorProto.INT8,
    onnx.TensorProto.UINT4: onnx.TensorProto.UINT8,
    onnx.TensorProto.FLOAT8E5M2: onnx.TensorProto.FLOAT,
}
_BEFORE_RELU = {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "BatchNormalization"}


@dataclass(frozen=True)
class FileOperator:
    """An operator that integer coverage counts."""

    name: str
    kind: str
    op_type: str
    output: str


def load(path: Path) -> onnx.ModelProto:
    """Read a file, or say why not."""
    if not path.is_file():
        raise VerifyError(f"there is no file {str(path)!r} to verify; export the model first")
    try:
        return onnx.load(str(path))
    except Exception as error:
        raise VerifyError(f"{str(path)!r} is not an ONNX file: {error}") from error


def has_fp8(model: onnx.ModelProto) -> bool:
    """Whether a file has tensors in fp8."""
    return any(
        _quantizes_to(n) in (onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E5M2) for n in model.graph.node
    )


def operators(model: onnx.ModelProto) -> list[FileOperator]:
    """Convolutions, linear layers, matrix products and additions of two computed tensors."""
    constant = _constants(model)
    found = []
    for node in model.graph.node:
        kind = _kind(node, constant)
        if kind:
            found.append(FileOperator(node.name, kind, node.op_type, node.output[0]))
    return found


def _kind(node: onnx.NodeProto, constant: set[str]) -> str | None:
    if node.op_type == "Conv":
        return "conv"
    if node.op_type == "ConvTranspose":
        return "conv_transpose"
    if node.op_type in _MATRIX:
        return "linear" if node.input[1] in constant or node.op_type == "Gemm" else "matmul"
    if node.op_type == "Add" and not any(i in constant for i in node.input):
        return "add"
    return None


def _constants(model: onnx.ModelProto) -> set[str]:
    """Names of tensors that do not depend on the inputs."""
    known = {i.name for i in model.graph.initializer}
    for node in model.graph.node:
        if all(name in known or not name for name in node.input):
            known.update(node.output)
    return known


def quantized_tensors(model: onnx.ModelProto) -> list[str]:
    """The tensors that QuantizeLinear makes while the file runs."""
    return [n.output[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]


def _quantizes_to(node: onnx.NodeProto) -> int | None:
    """The type that a QuantizeLinear names, where it has no zero point to tell by."""
    return next((a.i for a in node.attribute if a.name == "output_dtype"), None)


def integer_weights(model: onnx.ModelProto) -> list[np.ndarray]:
    """The constants stored as int8."""
    stored = (i for i in model.graph.initializer if i.data_type == onnx.TensorProto.INT8)
    return [numpy_helper.to_array(i) for i in stored]


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy that also gives out the tensors ``names``, or ``name/wide`` where numpy has no such type."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    present = {o.name for o in copy.graph.output}
    points = {i.name: i.data_type for i in copy.graph.initializer}
    kinds = {n.output[0]: _quantizes_to(n) or points.get(n.input[2]) for n in copy.graph.node if len(n.input) > 2}
    kinds |= {n.output[0]: _quantizes_to(n) for n in copy.graph.node if len(n.input) == 2}
    for name in names:
        if name in present:
            continue
        wider = _WIDER.get(kinds.get(name) or 0)
        if wider is not None:
            copy.graph.node.append(onnx.helper.make_node("Cast", [name], [f"{name}{WIDE}"], to=wider))
        copy.graph.output.append(onnx.helper.make_empty_tensor_value_info(f"{name}{WIDE}" if wider else name))
    return copy


def float_twin(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same network in FP32: without quantizers, weights dequantized. The yardstick for speed and size.

    Where a quantizer stands for the ReLU that export has dropped, the ReLU is put back.
    """
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    values = {i.name: numpy_helper.to_array(i) for i in twin.graph.initializer}
    renamed: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    floats: dict[str, np.ndarray] = {}
    outputs = {o.name for o in twin.graph.output}
    makers = {name: n.op_type for n in twin.graph.node for name in n.output}
    for node in twin.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)
        if node.op_type == "QuantizeLinear":
            source = node.input[0]
            if makers.get(source) in _BEFORE_RELU and len(node.input) > 2 and _starts_at_zero(values[node.input[2]]):
                kept.append(onnx.helper.make_node("Relu", [source], [f"{source}/relu"]))
                source = f"{source}/relu"
            renamed[node.output[0]] = source
        elif node.op_type == "DequantizeLinear" and node.input[0] in values:
            floats[node.output[0]] = _dequantize(node, values)
        elif node.op_type == "DequantizeLinear":
            if node.output[0] in outputs:
                kept.append(onnx.helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name))
            renamed[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    del twin.graph.node[:]
    twin.graph.node.extend(kept)
    used = {name for node in kept for name in node.input}
    initializers = [i for i in twin.graph.initializer if i.name in used]
    initializers += [numpy_helper.from_array(v, n) for n, v in floats.items() if n in used]
    del twin.graph.initializer[:], twin.graph.value_info[:]
    twin.graph.initializer.extend(initializers)
    return twin


def _starts_at_zero(zero_point: np.ndarray) -> bool:
    return zero_point.dtype == np.uint8 and zero_point.size == 1 and int(zero_point.reshape(())) == 0


def _dequantize(node: onnx.NodeProto, values: dict[str, Any]) -> np.ndarray:
    q, scale = values[node.input[0]], values[node.input[1]]
    zero = values[node.input[2]] if len(node.input) > 2 and node.input[2] else np.zeros_like(scale, dtype=np.int64)
    settings = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    axis = int(settings.get("axis", 1))
    block = int(settings.get("block_size", 0))
    if block:
        scale, zero = np.repeat(scale, block, axis), np.repeat(zero, block, axis)
    elif scale.ndim == 1:
        shape = [-1 if d == axis % q.ndim else 1 for d in range(q.ndim)]
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return ((q.astype(np.int64) - zero.astype(np.int64)) * scale).astype(np.float32)
