"""onnxruntime's LSTM with integer weights as an LSTM in FP32, to measure against."""

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

DYNAMIC = "DynamicQuantizeLSTM"
_WEIGHTS, _SCALES = (1, 2), (8, 10)  # their positions among its inputs


def plain_lstm(node: onnx.NodeProto, graph: onnx.GraphProto, floats: dict[str, np.ndarray]) -> onnx.NodeProto:
    """The same LSTM in FP32; its weights are added to ``floats``."""
    inputs = list(node.input[:8])
    for place, scales in zip(_WEIGHTS, _SCALES, strict=True):
        integers, scale = _computed(graph, [node.input[place], node.input[scales]])
        values = integers * scale.reshape(len(scale), 1, -1)
        inputs[place] = f"{node.name}/{'WR'[place - 1]}"
        floats[inputs[place]] = np.ascontiguousarray(values.transpose(0, 2, 1)).astype(np.float32)
    plain = onnx.helper.make_node("LSTM", inputs, list(node.output), name=node.name)
    plain.attribute.extend(node.attribute)
    return plain


def _computed(graph: onnx.GraphProto, names: list[str]) -> list[np.ndarray]:
    """Compute tensors that depend only on constants."""
    nodes = _makers(graph, names)
    read = {name for node in nodes for name in node.input} | set(names)
    stored = [i for i in graph.initializer if i.name in read]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in names]
    part = onnx.helper.make_model(onnx.helper.make_graph(nodes, "constants", [], outputs, stored))
    return [np.asarray(value) for value in ReferenceEvaluator(part).run(None, {})]


def _makers(graph: onnx.GraphProto, names: list[str]) -> list[onnx.NodeProto]:
    """All nodes that tensors are computed by, in the order of the graph."""
    needed, nodes = set(names), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            nodes.append(node)
    return nodes[::-1]
