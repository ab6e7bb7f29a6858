"""Tables of values in bundles: a float model for targets with unevenly spaced levels, and back.

A quantizer with a table is represented by a QuantizeLinear and a DequantizeLinear whose scale is the largest level, so
that ``split`` and ``join`` can find it; a weight with a table is represented by its values.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from bitwright.errors import ExportError
from bitwright.exporting.bundles.join import join
from bitwright.exporting.bundles.ranges import Place, Range
from bitwright.exporting.bundles.split import Split, read_in, split
from bitwright.exporting.record import ExportRecord
from bitwright.exporting.tables import table
from bitwright.quantizer import TensorQuantizer

Quantizer = Callable[[float], TensorQuantizer]  # that of a target, by its largest level


def split_tables(model: onnx.ModelProto, record: ExportRecord, levels: np.ndarray) -> Split:
    """Split a model whose quantizers are all tables of these levels; their scale is the largest level."""
    pairs = [n.name for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    if pairs:
        raise ExportError(f"{pairs[0]} has evenly spaced integers, not the levels of the target")
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    weights = _Plain(plain.graph, record, levels).run()
    stored = {r.place.integers for r in weights}
    found = split(plain, replace(record, tensors=tuple(t for t in record.tensors if t.tensor not in stored)))
    ranges = {name: replace(r, qmin=-1, qmax=1) for name, r in found.ranges.items()}
    return Split(found.model, ranges | {r.place.tensor: r for r in weights})


def join_tables(model: onnx.ModelProto, ranges: list[Range], quantizer: Quantizer) -> onnx.ModelProto:
    """A copy of a float model in which every tensor with a range goes through the target's table."""
    joined = join(model, [r for r in ranges if r.place.kind == "activation"])
    weights = {r.place.tensor: r for r in ranges if r.place.kind == "weight"}
    _Tables(joined.graph, quantizer).run(weights)
    return joined


class _Plain:
    """Replaces tables by pairs of quantizers, and by plain weights."""

    def __init__(self, graph: onnx.GraphProto, record: ExportRecord, levels: np.ndarray) -> None:
        self.graph, self.levels = graph, levels
        self.values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output}
        self.names = {t.tensor: t.name for t in record.tensors if t.tensor}
        self.weights: list[Range] = []
        self.renamed: dict[str, str] = {}

    def run(self) -> list[Range]:
        nodes = [made for node in self.graph.node for made in self._replaced(node)]
        for node in nodes:
            node.input[:] = [self.renamed.get(name, name) for name in node.input]
        _put(self.graph, _used(nodes, {o.name for o in self.graph.output}))
        return self.weights

    def _replaced(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Replace a Gather of levels by a pair of quantizers, or by nothing; keep everything else."""
        if node.op_type == "Cast" and node.input[0] in self.names:  # of the places of a stored weight
            return []
        if node.op_type == "Mul" and (value := self._stored(node)) is not None:
            self.graph.initializer.append(numpy_helper.from_array(value, self.weights[-1].place.tensor))
            return []
        place = self._search(node) if node.op_type == "Gather" else None
        return [node] if place is None else self._pair(node, place)

    def _search(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """What finds the places of a quantizer's values, whose levels an operator looks up; None if it does not."""
        place = self.makers.get(node.input[1])
        while place is not None and place.op_type == "Add":  # a table for each channel
            place = self.makers.get(place.input[0])
        return place if place is not None and place.output[0] in self.names else None

    def _pair(self, node: onnx.NodeProto, place: onnx.NodeProto) -> list[onnx.NodeProto]:
        source = self.makers[place.input[0]].input[0]
        name = place.output[0]
        largest = self._largest(self.names[name], self.values[node.input[0]])
        constants = {f"{name}.largest": np.float32(largest), f"{name}.zero": np.int8(0)}
        self.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items())
        place.output[0] = f"{name}/searched"
        quantize = helper.make_node("QuantizeLinear", [source, *constants], [name], name=f"{name}/quantize")
        return [quantize, helper.make_node("DequantizeLinear", [name, *constants], node.output, name=node.name)]

    def _stored(self, node: onnx.NodeProto) -> np.ndarray | None:
        """The values of a stored weight, which is noted; None for any other product."""
        gather = self.makers.get(node.input[0])
        cast = self.makers.get(gather.input[1]) if gather is not None and gather.op_type == "Gather" else None
        if gather is None or cast is None or cast.op_type != "Cast" or cast.input[0] not in self.names:
            return None
        table, scale, integers = self.values[gather.input[0]], self.values[node.input[1]], cast.input[0]
        name = self.names[integers]  # the user's name, unless it is taken
        name = node.output[0] if name in self.values or name in self.renamed.values() else name
        self.renamed[node.output[0]] = name
        place = Place(name, "weight", "int8", 8, integers)
        largest = self._largest(self.names[integers], table * np.ravel(scale)[:, None])
        self.weights.append(Range(place, largest, np.zeros((), np.int64), -1, 1))
        return (table[self.values[integers]] * scale).astype(np.float32)

    def _largest(self, name: str, table: np.ndarray) -> np.ndarray:
        """The largest level of a table, which must have the target's levels."""
        largest = np.asarray(table.max(), np.float32)
        if table.size != self.levels.size or not np.allclose(np.ravel(table), self.levels * largest, rtol=1e-5):
            raise ExportError(f"{name} has {table.size} levels, which are not those of the target for a whole tensor")
        return largest


class _Tables:
    """Replaces pairs of quantizers, and weights, by tables."""

    def __init__(self, graph: onnx.GraphProto, quantizer: Quantizer) -> None:
        self.graph, self.quantizer = graph, quantizer
        self.values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.constants: dict[str, np.ndarray] = {}

    def run(self, weights: dict[str, Range]) -> None:
        nodes = [node for r in weights.values() for node in self._weight(r)]
        nodes += [made for node in self.graph.node for made in self._replaced(node)]
        _put(self.graph, nodes)
        read = {name for node in self.graph.node for name in read_in(node)} - weights.keys()
        for stored in [i for i in self.graph.initializer if i.name not in read]:
            self.graph.initializer.remove(stored)
        self.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in self.constants.items())

    def _replaced(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Replace a pair of quantizers by a search among bounds and a look-up of levels."""
        if node.op_type == "QuantizeLinear":
            yield from self._search(node)
        elif node.op_type == "DequantizeLinear":
            yield helper.make_node("Gather", [f"{node.input[0]}.levels", node.input[0]], node.output, name=node.name)
        else:
            yield node

    def _search(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        source, name = node.input[0], node.output[0]
        bounds, levels = table(self.quantizer(float(self.values[node.input[1]])))
        steps = (len(levels) - 1).bit_length()
        filling = (1 << steps) - len(levels)  # NaN is a bound of nothing
        self.constants[f"{name}.bounds"] = np.pad(bounds.numpy(), (1, filling), constant_values=np.nan)
        self.constants[f"{name}.levels"] = np.pad(levels.numpy(), (0, filling))
        place = f"{name}.first"
        self.constants[place] = np.asarray(0, np.int32)
        for step in reversed(range(steps)):
            self.constants[f"{name}.step{step}"] = np.asarray(1 << step, np.int32)
            higher, bound, above = (f"{name}/{what}{step}" for what in ("higher", "bound", "above"))
            yield helper.make_node("Add", [place, f"{name}.step{step}"], [higher], name=higher)
            yield helper.make_node("Gather", [f"{name}.bounds", higher], [bound], name=bound)
            yield helper.make_node("GreaterOrEqual", [source, bound], [above], name=above)
            result = f"{name}/place{step}" if step else name
            yield helper.make_node("Where", [above, higher, place], [result], name=result)
            place = result

    def _weight(self, found: Range) -> Iterator[onnx.NodeProto]:
        """A weight as indices into the table of its largest level."""
        tensor, integers, largest = found.place.tensor, found.place.integers, found.scale.astype(np.float32)
        quantizer = self.quantizer(float(largest))
        self.constants[integers] = quantizer.integers(torch.tensor(self.values[tensor])).numpy().astype(np.uint8)
        self.constants[f"{tensor}.levels"] = quantizer.method.levels().numpy()
        self.constants[f"{tensor}.largest"] = largest
        place, level = f"{tensor}/place", f"{tensor}/level"
        yield helper.make_node("Cast", [integers], [place], name=place, to=onnx.TensorProto.INT32)
        yield helper.make_node("Gather", [f"{tensor}.levels", place], [level], name=level)
        yield helper.make_node("Mul", [level, f"{tensor}.largest"], [tensor], name=f"{tensor}/scaled")


def _put(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Set the nodes of a graph, some of which may be its own."""
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _used(nodes: list[onnx.NodeProto], wanted: set[str]) -> list[onnx.NodeProto]:
    """The nodes that something reads, in order."""
    kept = []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(read_in(node))
            kept.append(node)
    return kept[::-1]
