"""Split a Q/DQ model into a float model and the ranges of its tensors.

Weights keep the values that their integers stand for. A tensor that is read both quantized and in float goes through an
Identity, whose result has the range.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from bitwright.errors import ExportError
from bitwright.exporting.bundles.ranges import Place, Range
from bitwright.exporting.onnx.file import dequantized, inner_nodes
from bitwright.exporting.record import ExportRecord
from bitwright.spec import QuantSpec

_PAIR = ("QuantizeLinear", "DequantizeLinear")
_SHAPES = ("Shape", "Size")  # they read no values
_CLIPS = {"Clip": ("low", "high"), "Min": ("high",), "Max": ("low",)}


@dataclass
class Split:
    """The float model, and the ranges by the names of its tensors."""

    model: onnx.ModelProto
    ranges: dict[str, Range]


def split(model: onnx.ModelProto, record: ExportRecord) -> Split:
    """Split a Q/DQ model that ``export`` made."""
    clean = onnx.ModelProto()
    clean.CopyFrom(model)
    return Split(clean, _Splitting(clean.graph, record).run())


class _Splitting:
    def __init__(self, graph: onnx.GraphProto, record: ExportRecord) -> None:
        self.graph = graph
        self.values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output}
        self.outputs = {o.name for o in graph.output}
        self.specs = {t.tensor: t.spec for t in record.tensors if t.tensor}
        self.taken = {*self.makers, *self.values, *(i.name for i in graph.input)}
        self.ranges: dict[str, Range] = {}
        self.renamed: dict[str, str] = {}
        self.dropped: set[int] = set()
        self.added: dict[int, onnx.NodeProto] = {}
        self.floats: dict[str, np.ndarray] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def run(self) -> dict[str, Range]:
        self._refuse_what_is_inside()
        for node in self.graph.node:
            if node.op_type == "QuantizeLinear":
                self._take_out(node)
            elif node.op_type == "DequantizeLinear" and node.input[0] in self.values:
                self._store(node)
        self._rebuild()
        return self.ranges

    def _refuse_what_is_inside(self) -> None:
        """Refuse tables of values, branches and loops with quantizers, and integers that something else reads."""
        for tensor in self.specs:
            if all(n.op_type not in _PAIR for n in (*self.readers.get(tensor, []), self.makers.get(tensor)) if n):
                raise ExportError(
                    f"{tensor} holds indices into a table of values, which a file of ranges cannot express"
                )
        for node in self.graph.node:
            if any(inner.op_type in _PAIR for inner in inner_nodes(node)):
                raise ExportError(f"{node.name} has quantizers in a branch or loop, which no file of ranges names")
            if node.op_type == "DynamicQuantizeLinear":
                raise ExportError(f"{node.name} finds its range as it runs, which a file of ranges cannot express")
            if node.op_type == "QuantizeLinear":
                self._refuse_other_readers(node)

    def _refuse_other_readers(self, node: onnx.NodeProto) -> None:
        others = [n.op_type for n in self.readers.get(node.output[0], []) if n.op_type != "DequantizeLinear"]
        if others or node.output[0] in self.outputs:
            raise ExportError(f"the integers of {node.name} are read by {others or ['the caller']}")

    def _take_out(self, node: onnx.NodeProto) -> None:
        """Remove one quantizer of a computed tensor, with the clips before it."""
        before, limits = self._clips(node)
        first = before[0] if before else node
        source = first.input[0]
        after = self.readers.get(node.output[0], [])  # they dequantize; others were refused
        ours = set(map(id, [*before, node]))
        self.dropped |= ours | set(map(id, after))
        results = [n.output[0] for n in after]
        returned = [name for name in results if name in self.outputs]
        tensor = next(iter(returned), source)
        if self._needs_copy(source, ours, returned):
            tensor = tensor if returned else self._free(f"{source}/quantized")
            copy = onnx.helper.make_node("Identity", [source], [tensor], name=self._free(f"{tensor}/read"))
            self.added[id(first)] = copy
        elif returned:
            self.renamed[source] = tensor
        self.renamed |= {name: tensor for name in results if name != tensor}
        self._note(node, tensor, limits)

    def _needs_copy(self, source: str, ours: set[int], returned: list[str]) -> bool:
        """Whether the quantized tensor needs another name than the float one, which stays in use or is an input."""
        others = [n for n in self.readers[source] if id(n) not in ours and n.op_type not in _SHAPES]
        if others or len(returned) > 1:
            return True
        return source in self.outputs or source in self.values or bool(returned and source not in self.makers)

    def _clips(self, node: onnx.NodeProto) -> tuple[list[onnx.NodeProto], tuple[int, int]]:
        """The operators that clip to fewer integers than the type has, first to last, and the integers left."""
        kind = self.values[node.input[2]].dtype if len(node.input) > 2 else np.dtype(np.uint8)
        lowest, highest = _limits(kind)
        found: list[onnx.NodeProto] = []
        ends: dict[str, int] = {}
        maker = self.makers.get(node.input[0])
        while len(ends) < 2 and maker is not None:
            limits = self._clips_at(maker, node)
            if not limits:
                break
            ends |= limits
            found.insert(0, maker)
            maker = self.makers.get(maker.input[0])
        low, high = ends.get("low", lowest), ends.get("high", highest)
        narrower = (low, high) != (lowest, highest) and lowest <= low < high <= highest
        return (found, (low, high)) if len(ends) == 2 and narrower else ([], (lowest, highest))

    def _clips_at(self, maker: onnx.NodeProto, node: onnx.NodeProto) -> dict[str, int]:
        """The integers of quantizer ``node`` that an operator before it clips to; none if it does something else."""
        names, result = _CLIPS.get(maker.op_type, ()), maker.output[0]
        limits = [self.values[i] for i in maker.input[1:] if i in self.values]
        if not names or len(limits) != len(names) or len(self.readers[result]) != 1 or result in self.outputs:
            return {}
        scale, point = (np.ravel(self.values[i]).astype(np.float64) for i in node.input[1:3])
        steps = [np.ravel(limit).astype(np.float64) / scale + point for limit in limits]
        if any(np.abs(s - np.rint(s[0])).max() > 1e-2 for s in steps):
            return {}
        return {name: int(np.rint(s[0])) for name, s in zip(names, steps, strict=True)}

    def _store(self, node: onnx.NodeProto) -> None:
        """Replace one constant that is stored as integers."""
        tensor = node.output[0]
        self.dropped.add(id(node))
        self.floats[tensor] = dequantized(node, self.values)
        self._note(node, tensor, None)

    def _note(self, node: onnx.NodeProto, tensor: str, limits: tuple[int, int] | None) -> None:
        """Keep the range of a tensor, by the Q of a computed one or the DQ of a stored one."""
        integers = node.output[0] if limits is not None else node.input[0]
        scale = self.values[node.input[1]]
        has_point = len(node.input) > 2 and node.input[2]
        kind = self.values[node.input[2] if has_point else node.input[0]].dtype
        if _is_floating(kind):
            raise ExportError(f"{tensor} is quantized to {kind.name}: files of ranges are for integers")
        point = self.values[node.input[2]].astype(np.int64) if has_point else np.zeros(scale.shape, np.int64)
        settings = {a.name: a.i for a in node.attribute}
        axis = settings.get("axis", 1) if scale.ndim else None
        block = settings.get("block_size") or None
        low, high, bits = self._span(integers, kind, limits)
        what = "activation" if limits is not None else "bias" if kind == np.int32 else "weight"
        place = Place(tensor, what, kind.name, bits, integers, axis, block, scale.shape)
        self.ranges[tensor] = Range(place, scale.astype(np.float32), point, low, high)

    def _span(self, integers: str, kind: np.dtype, limits: tuple[int, int] | None) -> tuple[int, int, int]:
        """The lowest and highest integer, and the bits: as the record's spec says, or the clip, or the type."""
        if integers in self.specs:
            spec = QuantSpec.parse(self.specs[integers])
            shift = 128 if spec.format.signed and kind == np.uint8 else 0
            return spec.qmin + shift, spec.qmax + shift, spec.format.bits
        low, high = limits or _limits(kind)
        signed = np.issubdtype(kind, np.signedinteger)
        bits = next(b for b in range(2, 33) if high < 2 ** (b - 1 if signed else b) and low >= -(2 ** (b - 1)))
        return low, high, bits

    def _free(self, wish: str) -> str:
        names = itertools.chain([wish], (f"{wish}/{i}" for i in itertools.count(2)))
        name = next(n for n in names if n not in self.taken)
        self.taken.add(name)
        return name

    def _rebuild(self) -> None:
        graph = self.graph
        kept = list(self._kept())
        for node in kept:
            self._rename(node)
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in kept]
        del graph.node[:]
        graph.node.extend(copies)
        used = {name for node in copies for name in read_in(node)} | self.outputs
        stored = [i for i in graph.initializer if i.name in used]
        stored += [numpy_helper.from_array(v, n) for n, v in self.floats.items() if n in used]
        stored = [onnx.TensorProto.FromString(i.SerializeToString()) for i in stored]
        del graph.initializer[:], graph.value_info[:]
        graph.initializer.extend(stored)

    def _rename(self, node: onnx.NodeProto) -> None:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = self._final(name)
        for inner in inner_nodes(node):
            self._rename(inner)

    def _kept(self) -> Iterator[onnx.NodeProto]:
        for node in self.graph.node:
            if id(node) in self.added:
                yield self.added[id(node)]
            if id(node) not in self.dropped:
                yield node

    def _final(self, name: str) -> str:
        while name in self.renamed:
            name = self.renamed[name]
        return name


def _limits(kind: np.dtype) -> tuple[int, int]:
    """The integers that a type holds."""
    if kind.name in ("int4", "uint4", "int2", "uint2"):
        bits, signed = int(kind.name[-1]), kind.name.startswith("int")
        return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    info = np.iinfo(kind)
    return int(info.min), int(info.max)


def _is_floating(kind: np.dtype) -> bool:
    return "float" in kind.name


def read_in(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, including inside its subgraphs."""
    yield from node.input
    for inner in inner_nodes(node):
        yield from read_in(inner)
