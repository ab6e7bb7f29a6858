"""An ONNX file that was read: its record, its tensors, and its FP32 twin."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from bitwright.errors import VerifyError, useful_line
from bitwright.exporting.contents import Contents
from bitwright.exporting.formats.base import FileNode, LoadedFile
from bitwright.exporting.onnx.contents import add_contents
from bitwright.exporting.onnx.external import outline, shipped, stored_bytes
from bitwright.exporting.onnx.plain_lstm import DYNAMIC, plain_lstm
from bitwright.exporting.onnx.seal import DATA, RECORD, check_data, check_seal
from bitwright.exporting.onnx.work import multiply_adds
from bitwright.exporting.record import ExportRecord

_WIDE = "/wide"  # suffix of a tensor that is output in a wider type
_WIDER: dict[int, int] = {
    onnx.TensorProto.INT4: onnx.TensorProto.INT8,
    onnx.TensorProto.UINT4: onnx.TensorProto.UINT8,
    onnx.TensorProto.FLOAT8E5M2: onnx.TensorProto.FLOAT,
}
_IN_BYTES = {"int4": np.int8, "int2": np.int8, "uint4": np.uint8, "uint2": np.uint8}
_BEFORE_RELU = {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "BatchNormalization"}


def inner_nodes(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes in the branches or the body of a node."""
    return [inner for a in node.attribute if a.HasField("g") for inner in a.g.node]


class OnnxFile(LoadedFile):
    """An ONNX model in memory.

    Attributes:
        widened: for a tensor that numpy has no type for, the name of the output that has it in a wider type.
    """

    def __init__(self, path: Path, proto: onnx.ModelProto, record: ExportRecord | None, size: int = 0) -> None:
        self.path, self.proto, self.record = path, proto, record
        self.size = size or stored_bytes(proto) + outline(proto).ByteSize()
        self.widened: dict[str, str] = {}
        stored = {i.name for i in proto.graph.initializer}
        self.inputs = [i.name for i in proto.graph.input if i.name not in stored]
        self.outputs = [o.name for o in proto.graph.output]

    @classmethod
    def read(cls, path: Path) -> "OnnxFile":
        """Read a file; one that Bitwright wrote must be unchanged."""
        if not path.is_file():
            raise VerifyError(f"there is no file {str(path)!r}; export the model first")
        try:
            data = path.read_bytes()
            sealed = check_seal(data)
            proto = onnx.load_model_from_string(data)
            metadata = {entry.key: entry.value for entry in proto.metadata_props}
            if not sealed and (RECORD in metadata or proto.producer_name == "bitwright"):
                raise VerifyError("its end is missing or was changed after Bitwright wrote it; export again")
            size = len(data)
            if DATA in metadata:
                size += check_data(path, metadata[DATA]).stat().st_size
            onnx.load_external_data_for_model(proto, str(path.parent))
            record = ExportRecord.from_json(metadata[RECORD]) if RECORD in metadata else None
            onnx.checker.check_model(outline(proto))
            for tensor in proto.graph.initializer:
                numpy_helper.to_array(tensor)
        except VerifyError as error:
            raise VerifyError(f"{str(path)!r} cannot be trusted: {error}") from error
        except Exception as error:
            why = f"{type(error).__name__}: {useful_line(error)}"
            raise VerifyError(f"{str(path)!r} is not an ONNX file: {why}") from error
        return cls(path, proto, record, size)

    def shipped(self) -> dict[str, bytes]:
        return shipped(self.proto)

    def batched(self) -> list[str]:
        shapes = {i.name: i.type.tensor_type.shape.dim for i in self.proto.graph.input if i.name in self.inputs}
        return [name for name, sizes in shapes.items() if sizes and sizes[0].dim_param]

    def watching(self, tensors: Iterable[str]) -> "OnnxFile":
        """A copy that also outputs tensors, in a wider type where numpy has no such type."""
        copy = onnx.ModelProto()
        copy.CopyFrom(self.proto)
        graph = copy.graph
        points = {i.name: i.data_type for i in graph.initializer}
        kinds = {n.output[0]: _quantizes_to(n, points) for n in graph.node if n.op_type == "QuantizeLinear"}
        taken = {name for n in graph.node for name in n.output} | set(self.outputs)
        widened = {}
        for name in dict.fromkeys(tensors):
            wider = _WIDER.get(kinds.get(name) or 0)
            if wider is not None:
                widened[name] = _free(f"{name}{_WIDE}", taken)
                graph.node.append(onnx.helper.make_node("Cast", [name], [widened[name]], to=wider))
            if name not in self.outputs:
                graph.output.append(onnx.helper.make_empty_tensor_value_info(widened.get(name, name)))
        made = OnnxFile(self.path, copy, self.record)
        made.widened = widened
        return made

    def beginning(self, count: int) -> "OnnxFile":
        """A copy of the first operators, which outputs what is read later."""
        copy = onnx.ModelProto()
        copy.CopyFrom(self.proto)
        graph = copy.graph
        read = {name for node in graph.node[count:] for name in node.input} | set(self.outputs)
        made = [name for node in graph.node[:count] for name in node.output if name in read]
        del graph.node[count:], graph.output[:]
        graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in made)
        return OnnxFile(self.path, copy, self.record)

    def output_of(self, tensor: str) -> str:
        return self.widened.get(tensor, tensor)

    def constant(self, tensor: str) -> np.ndarray | None:
        found = next((i for i in self.proto.graph.initializer if i.name == tensor), None)
        if found is None:
            return None
        values = numpy_helper.to_array(found)
        return values.astype(_IN_BYTES[values.dtype.name]) if values.dtype.name in _IN_BYTES else values

    def contents(self) -> dict[str, str]:
        """Digests of its operators, its tensors, and all else."""
        found = Contents()
        add_contents(self.proto, found)
        return found.digests

    def with_quantizers(self) -> onnx.ModelProto:
        return self.proto

    def nodes(self) -> list[FileNode]:
        return [FileNode(n.name, n.op_type, tuple(n.input), tuple(n.output)) for n in self.proto.graph.node]

    def multiply_adds(self, feeds: Mapping[str, np.ndarray]) -> dict[str, int | None]:
        """Count them by the shapes inferred from those of the inputs."""
        return multiply_adds(self.proto, {name: value.shape for name, value in feeds.items()})

    def float_twin(self) -> "OnnxFile":
        """The same network in FP32: without quantizers, weights dequantized; the baseline for speed and size.

        Where a quantizer replaces a ReLU that export dropped, the ReLU is restored.
        """
        twin = onnx.ModelProto()
        twin.CopyFrom(self.proto)
        _Unquantizing(twin.graph, self.record).run()
        return OnnxFile(self.path, twin, None)


class _Unquantizing:
    """Removes the quantizers from a graph."""

    def __init__(self, graph: onnx.GraphProto, record: ExportRecord | None) -> None:
        self.graph = graph
        self.places = {t.tensor for t in record.tensors} if record is not None else set()
        self.values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.outputs = {o.name for o in graph.output}
        self.makers = {name: n.op_type for n in graph.node for name in n.output}
        self.renamed: dict[str, str] = {}
        self.floats: dict[str, np.ndarray] = {}
        self.kept: list[onnx.NodeProto] = []

    def run(self) -> None:
        graph = self.graph
        self._skip_tables()
        for node in graph.node:
            for i, name in enumerate(node.input):
                node.input[i] = self.renamed.get(name, name)
            {
                "QuantizeLinear": self._skip_quantize,
                "DequantizeLinear": self._skip_dequantize,
                DYNAMIC: lambda lstm: self.kept.append(plain_lstm(lstm, graph, self.floats)),
            }.get(node.op_type, self.kept.append)(node)
        used = set(self.outputs)
        for node in reversed(self.kept):
            if used.intersection(node.output):
                used.update(node.input)
        self.kept = [node for node in self.kept if used.intersection(node.output)]
        del graph.node[:]
        graph.node.extend(self.kept)
        initializers = [i for i in graph.initializer if i.name in used]
        initializers += [numpy_helper.from_array(v, n) for n, v in self.floats.items() if n in used]
        del graph.initializer[:], graph.value_info[:]
        graph.initializer.extend(initializers)

    def _skip_tables(self) -> None:
        """Remove tables of values: a look-up of a level returns the value itself."""
        makers = {name: node for node in self.graph.node for name in node.output}
        for node in [n for n in self.graph.node if n.op_type == "Gather" and n.input[1] in makers]:
            place = makers[node.input[1]]
            if place.op_type == "Add":  # a table for each channel
                place = makers.get(place.input[0], place)
            if place.op_type == "Cast" and place.input[0] in self.places:  # a constant, times its scale
                (reader,) = (n for n in self.graph.node if node.output[0] in n.input)
                levels = self.values[node.input[0]][self.values[place.input[0]]]
                self.floats[reader.output[0]] = levels * self.values[reader.input[1]]
                reader.output[0] = f"{reader.output[0]}/table"
            elif place.op_type == "Where" and place.output[0] in self.places:
                source = makers[place.input[0]].input[0]
                if node.output[0] in self.outputs:
                    self.kept.append(onnx.helper.make_node("Identity", [source], [node.output[0]], name=node.name))
                self.renamed[node.output[0]] = source
                node.output[0] = f"{node.output[0]}/table"

    def _skip_quantize(self, node: onnx.NodeProto) -> None:
        source = node.input[0]
        stands_for_relu = len(node.input) > 2 and _starts_at_zero(self.values[node.input[2]])
        if self.makers.get(source) in _BEFORE_RELU and stands_for_relu:
            self.kept.append(onnx.helper.make_node("Relu", [source], [f"{source}/relu"], name=f"{node.name}/relu"))
            source = f"{source}/relu"
        self.renamed[node.output[0]] = source

    def _skip_dequantize(self, node: onnx.NodeProto) -> None:
        if node.input[0] in self.values:
            self.floats[node.output[0]] = dequantized(node, self.values)
            return
        if node.output[0] in self.outputs:
            self.kept.append(onnx.helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name))
        self.renamed[node.output[0]] = node.input[0]


def _quantizes_to(node: onnx.NodeProto, points: dict[str, int]) -> int | None:
    """The type that a QuantizeLinear makes: that of its zero point, or the one it names."""
    named = next((a.i for a in node.attribute if a.name == "output_dtype" and a.i), None)
    return named or (points.get(node.input[2]) if len(node.input) > 2 else onnx.TensorProto.UINT8)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _starts_at_zero(zero_point: np.ndarray) -> bool:
    return zero_point.dtype == np.uint8 and zero_point.size == 1 and int(zero_point.reshape(())) == 0


def dequantized(node: onnx.NodeProto, values: dict[str, Any]) -> np.ndarray:
    """The result of a DequantizeLinear of a constant."""
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
