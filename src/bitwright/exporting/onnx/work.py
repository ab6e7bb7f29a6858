"""Count the multiplications and additions of an ONNX graph, by inferred shapes."""

import math
from collections.abc import Mapping

import onnx

from bitwright.exporting.onnx.external import outline
from bitwright.exporting.onnx.plain_lstm import DYNAMIC

Shapes = dict[str, tuple[int, ...]]


def multiply_adds(model: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, int | None]:
    """The number for each layer and product, by node name; None where a shape is unknown."""
    shapes = _shapes(model, inputs)
    return {node.name: _count(node, shapes) for node in model.graph.node if node.op_type in (*_COUNTS, *_RECURRENT)}


def _count(node: onnx.NodeProto, shapes: Shapes) -> int | None:
    if node.op_type in _RECURRENT:
        x, weight, recurrent = (shapes.get(name) for name in node.input[:3])
        if x is None or weight is None or recurrent is None:
            return None
        return math.prod(x[:2]) * (math.prod(weight) + math.prod(recurrent))  # all gates at every step of every sample
    known = [shapes.get(name) for name in (*node.input[:2], node.output[0])]
    first, second, result = known
    if first is None or second is None or result is None:
        return None
    return _COUNTS[node.op_type](node, first, second, result)


def _conv(node: onnx.NodeProto, x: tuple[int, ...], weight: tuple[int, ...], result: tuple[int, ...]) -> int:
    return math.prod(result) * math.prod(weight[1:])


def _conv_transpose(node: onnx.NodeProto, x: tuple[int, ...], weight: tuple[int, ...], result: tuple[int, ...]) -> int:
    return math.prod(x) * math.prod(weight[1:])


def _matmul(node: onnx.NodeProto, a: tuple[int, ...], b: tuple[int, ...], result: tuple[int, ...]) -> int:
    return math.prod(result) * (a[-1] if a else 1)


def _gemm(node: onnx.NodeProto, a: tuple[int, ...], b: tuple[int, ...], result: tuple[int, ...]) -> int:
    transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    return math.prod(result) * a[0 if transposed else 1]


_COUNTS = {"Conv": _conv, "ConvTranspose": _conv_transpose, "MatMul": _matmul, "Gemm": _gemm}
_RECURRENT = ("LSTM", "GRU", "RNN", DYNAMIC)


def _shapes(model: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> Shapes:
    fixed = outline(model)
    graph = fixed.graph
    del graph.value_info[:]
    for value in graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, inputs.get(value.name, ()), strict=False):
            dim.dim_value = size
    _name_lstms(graph)
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    found = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    shapes: Shapes = {i.name: tuple(i.dims) for i in found.initializer}
    for value in (*found.input, *found.value_info, *found.output):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            shapes[value.name] = tuple(d.dim_value for d in dims)
    return shapes


def _name_lstms(graph: onnx.GraphProto) -> None:
    """Rename onnxruntime's LSTM to ONNX's, which can then infer the shapes of its results."""
    for node in graph.node:
        if node.op_type == DYNAMIC:
            node.op_type, node.domain = "LSTM", ""
            del node.input[8:]
