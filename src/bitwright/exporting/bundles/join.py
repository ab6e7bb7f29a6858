"""Join a float model and ranges into a Q/DQ model: what the target computes, if it reads the files as documented."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bitwright.exporting.bundles.ranges import Range
from bitwright.exporting.onnx.file import inner_nodes

_TYPES = {
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "int16": onnx.TensorProto.INT16,
    "uint16": onnx.TensorProto.UINT16,
    "int32": onnx.TensorProto.INT32,
    "int4": onnx.TensorProto.INT4,
    "uint4": onnx.TensorProto.UINT4,
    "int2": getattr(onnx.TensorProto, "INT2", onnx.TensorProto.INT8),
    "uint2": getattr(onnx.TensorProto, "UINT2", onnx.TensorProto.UINT8),
}
_FULL = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535)}


def join(model: onnx.ModelProto, ranges: Iterable[Range]) -> onnx.ModelProto:
    """A copy of a float model in which every tensor with a range is quantized and dequantized."""
    joined = onnx.ModelProto()
    joined.CopyFrom(model)
    _Joining(joined.graph).run({r.place.tensor: r for r in ranges})
    return joined


class _Joining:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.outputs = {o.name for o in graph.output}
        self.inputs = {i.name for i in graph.input}
        self.constants: list[onnx.TensorProto] = []
        self.read_as: dict[str, str] = {}

    def run(self, ranges: dict[str, Range]) -> None:
        graph = self.graph
        stored = ranges.keys() & self.values.keys()
        nodes = [self._stored(r) for name, r in ranges.items() if name in stored]
        nodes += self._quantized(self.inputs - stored, ranges)
        for node in graph.node:
            self._rename(node)
            nodes += [node, *self._quantized(node.output, ranges)]
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
        kept = [onnx.TensorProto.FromString(i.SerializeToString()) for i in graph.initializer if i.name not in stored]
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(copies)
        graph.initializer.extend([*kept, *self.constants])

    def _quantized(self, names: Iterable[str], ranges: dict[str, Range]) -> list[onnx.NodeProto]:
        return [node for name in sorted(names) if name in ranges for node in self._computed(ranges[name], name)]

    def _rename(self, node: onnx.NodeProto) -> None:
        for i, name in enumerate(node.input):
            node.input[i] = self.read_as.get(name, name)
        for inner in inner_nodes(node):
            self._rename(inner)

    def _computed(self, found: Range, source: str) -> list[onnx.NodeProto]:
        """Quantize and dequantize a tensor; outputs of the model become the dequantized tensor."""
        place, tensor = found.place, found.place.tensor
        result = tensor if tensor in self.outputs and tensor not in self.inputs else f"{tensor}/dequantized"
        if result == tensor:
            source = f"{tensor}/float"
            self._give_other_name(tensor, source)
        else:
            self.read_as[tensor] = result
        nodes: list[onnx.NodeProto] = []
        if (found.qmin, found.qmax) != _FULL.get(place.type):
            ends = {"low": found.minimum, "high": found.maximum}
            limits = [self._constant(f"{tensor}.{n}", e.astype(np.float32)) for n, e in ends.items()]
            low, high = f"{tensor}/above", f"{tensor}/clipped"
            nodes.append(helper.make_node("Max", [source, limits[0]], [low], name=low))
            nodes.append(helper.make_node("Min", [low, limits[1]], [high], name=high))
            source = high
        parameters, places = self._parameters(found), _places(found)
        quantize, dequantize = f"{tensor}/quantize", f"{tensor}/dequantize"
        nodes.append(
            helper.make_node("QuantizeLinear", [source, *parameters], [place.integers], name=quantize, **places)
        )
        integers = [place.integers, *parameters]
        return [*nodes, helper.make_node("DequantizeLinear", integers, [result], name=dequantize, **places)]

    def _give_other_name(self, tensor: str, name: str) -> None:
        """Rename the tensor that an output's producer makes, so that the output can be the dequantized one."""
        for node in self.graph.node:
            for i, made in enumerate(node.output):
                if made == tensor:
                    node.output[i] = name

    def _stored(self, found: Range) -> onnx.NodeProto:
        """Store a constant as integers, by its range."""
        place = found.place
        scale, point = (_along(p, found, self.values[place.tensor]) for p in (found.scale, found.zero_point))
        steps = np.rint(self.values[place.tensor].astype(np.float64) / scale.astype(np.float64)) + point
        integers = np.clip(steps, found.qmin, found.qmax).astype(np.int64)
        self._constant(place.integers, integers, place.type)
        parameters = self._parameters(found)
        name = f"{place.tensor}/dequantize"
        return helper.make_node(
            "DequantizeLinear", [place.integers, *parameters], [place.tensor], name=name, **_places(found)
        )

    def _parameters(self, found: Range) -> list[str]:
        tensor = found.place.tensor
        scale = self._constant(f"{tensor}.scale", found.scale.astype(np.float32))
        if found.place.type == "int32":
            return [scale]
        return [scale, self._constant(f"{tensor}.zero_point", found.zero_point, found.place.type)]

    def _constant(self, name: str, array: np.ndarray, type: str = "") -> str:
        if type:
            flat = [int(v) for v in np.ravel(array)]
            self.constants.append(helper.make_tensor(name, _TYPES[type], array.shape, flat))
        else:
            self.constants.append(numpy_helper.from_array(array, name))
        return name


def _places(found: Range) -> dict[str, Any]:
    place = found.place
    settings: dict[str, Any] = {} if place.axis is None else {"axis": place.axis}
    return settings if place.block is None else {**settings, "block_size": place.block}


def _along(numbers: np.ndarray, found: Range, values: np.ndarray) -> np.ndarray:
    """Scales or zero points in a shape that broadcasts against the tensor."""
    place = found.place
    if place.axis is None:
        return numbers
    if place.block is not None:
        return np.repeat(numbers, place.block, place.axis).take(range(values.shape[place.axis]), place.axis)
    return numbers.reshape([-1 if d == place.axis % values.ndim else 1 for d in range(values.ndim)])
