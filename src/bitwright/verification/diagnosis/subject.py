"""The subject of a diagnosis: the operators between the quantized tensors before a layer and the deviating one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from bitwright.exporting.onnx.file import OnnxFile

PASSED = ("Relu", "Clip", "Min", "Max")  # operators between a layer and the quantizer of its result
_Q = "QuantizeLinear"


@dataclass
class Subject:
    """A model that outputs its deviating quantized tensor; trials change copies of it."""

    model: onnx.ModelProto
    tensor: str

    @property
    def nodes(self) -> dict[str, onnx.NodeProto]:
        """The operators, by what they make."""
        return {name: node for node in self.model.graph.node for name in node.output}

    @property
    def constants(self) -> dict[str, onnx.TensorProto]:
        """The constants."""
        return {i.name: i for i in self.model.graph.initializer}

    @property
    def quantizer(self) -> onnx.NodeProto:
        """The operator that makes the integers."""
        return self.nodes[self.tensor]

    @property
    def layer(self) -> onnx.NodeProto | None:
        """The operator whose result is quantized; None for an input."""
        nodes = self.nodes
        found = nodes.get(self.quantizer.input[0])
        while found is not None and found.op_type in PASSED:
            found = nodes.get(found.input[0])
        return found

    def changed(self, change: Callable[["Subject"], bool]) -> "Subject | None":
        """A copy after a change; None if there was nothing to change."""
        copy = Subject(onnx.ModelProto(), self.tensor)
        copy.model.CopyFrom(self.model)
        return copy if change(copy) else None

    def insert(self, name: str, made: str, *nodes: onnx.NodeProto, reader: str = "") -> None:
        """Make the readers of a tensor (or the reader of that name) read the result of new operators on it."""
        graph = self.model.graph
        for node in graph.node:
            if node.name == reader or not reader:
                node.input[:] = [made if i == name else i for i in node.input]
        place = next((i + 1 for i, node in enumerate(graph.node) if name in node.output), 0)
        for node in reversed(nodes):
            graph.node.insert(place, node)

    def file(self, path: Path) -> OnnxFile:
        """The model as a file for runtimes."""
        return OnnxFile(path, self.model, None)


def around(file: OnnxFile, tensor: str, values: Callable[[list[str]], Mapping[str, np.ndarray]]) -> "Cut":
    """Cut out what computes a tensor from quantized ones; ``values`` has the values of tensors."""
    subject = Subject(file.proto, tensor)
    nodes, constants = subject.nodes, subject.constants
    kept: set[int] = set()
    ends: dict[str, None] = {}
    waiting = [subject.quantizer]
    while waiting:
        node = waiting.pop()
        kept.add(id(node))
        for name in [n for n in node.input if n and n not in constants]:
            maker = nodes.get(name)
            if maker is None or maker.op_type == _Q:
                ends[name] = None
            elif id(maker) not in kept:
                waiting.append(maker)
    feeds = dict(values(list(ends)))
    return Cut(Subject(_model_of(file.proto, kept, feeds, tensor), tensor), feeds)


def _model_of(whole: onnx.ModelProto, kept: set[int], feeds: Mapping[str, np.ndarray], tensor: str) -> onnx.ModelProto:
    """The kept operators of a model, as a separate model."""
    kinds = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, kinds[name], value.shape) for name, value in feeds.items()]
    nodes = [n for n in whole.graph.node if id(n) in kept]
    read = {name for n in nodes for name in n.input}
    constants = [c for c in whole.graph.initializer if c.name in read]
    graph = helper.make_graph(nodes, "cut", inputs, [helper.make_empty_tensor_value_info(tensor)], constants)
    return helper.make_model(graph, opset_imports=whole.opset_import, ir_version=whole.ir_version)


@dataclass
class Cut:
    """A part of a file, and what to feed it."""

    subject: Subject
    feeds: dict[str, np.ndarray]
