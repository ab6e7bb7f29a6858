"""View: a file as constraints see it, a graph of operators and the quantized tensors between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bitwright.errors import ConfigError, suggest
from bitwright.exporting import ExportedTensor, ExportRecord, LoadedFile
from bitwright.spec import QuantSpec

_KINDS = ("activation", "weight", "bias")

if TYPE_CHECKING:
    import onnx

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_Q, _DQ = "QuantizeLinear", "DequantizeLinear"


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor that is quantized and dequantized.

    Attributes:
        name: the user's name for it.
        kind: ``weight`` for a constant that a layer uses as its weight, ``bias`` for an int32 one, else ``activation``.
        type: of its integers (or fp8 numbers), such as ``int8``.
        bits: the number of bits used.
        scale: float32; without dimensions for the whole tensor.
        zero_point: shaped like the scale; zeros if the file names none.
        axis: along which its scales lie; None for one scale.
        block: how many values along the axis share a scale; None for one.
        source: the float tensor that is quantized; empty for a constant.
        results: the dequantized tensors that operators read.
    """

    name: str
    kind: Literal["activation", "weight", "bias"]
    type: str
    bits: int
    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None
    block: int | None
    source: str
    results: tuple[str, ...]

    @property
    def symmetric(self) -> bool:
        """Whether its integers are signed, and 0 stands for 0."""
        return not self.type.startswith("uint") and not self.zero_point.any()

    @property
    def per_tensor(self) -> bool:
        """Whether there is one scale."""
        return self.scale.size == 1 and self.block is None

    @property
    def position(self) -> int | None:
        """The fix position f of a scale 2**-f; None where the scale is not a power of two."""
        mantissa, exponent = np.frexp(self.scale.astype(np.float64))
        return int(1 - exponent.reshape(-1)[0]) if self.per_tensor and (mantissa == 0.5).all() else None


class View:
    """A file's operators, and the tensors that are quantized between them.

    Attributes:
        nodes: the operators that compute, without quantizers and their clips.
        tensors: the quantized tensors, in the order of the file.
    """

    def __init__(self, model: "onnx.ModelProto", record: ExportRecord | None, format: str) -> None:
        from onnx import numpy_helper

        self.model, self.record, self.format = model, record, format
        graph = model.graph
        self.outputs = [o.name for o in graph.output]
        self.constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.inputs = [i.name for i in graph.input if i.name not in self.constants]
        self.makers = {name: node for node in graph.node for name in node.output}
        self.readers = _readers(graph)
        self._specs, self._origins = _words_of(record)
        self.tensors = list(self._quantized())
        self._by_result = {name: t for t in self.tensors for name in t.results}
        self._by_source = {t.source: t for t in self.tensors}
        self.nodes = [n for n in graph.node if n.op_type not in (_Q, _DQ) and not _clips_for_quantizer(n)]

    @property
    def opset(self) -> int:
        """The version of ONNX that the file needs."""
        return max((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), default=0)

    @classmethod
    def of(cls, file: LoadedFile) -> "View | None":
        """The view of a file; None for one that is not ONNX."""
        model = file.with_quantizers()
        written = file.record.format if file.record is not None else file.format
        return cls(model, file.record, written) if model is not None else None

    def named(self, node: "onnx.NodeProto") -> str:
        """The user's name for an operator, and its type."""
        return f"{self._origins.get(node.name, node.name)} ({node.op_type})"

    def of_kind(self, *kinds: str) -> list[QuantizedTensor]:
        """The quantized tensors of some kinds."""
        for kind in kinds:
            if kind not in _KINDS:
                raise ConfigError(f"unknown kind of tensor {kind!r}{suggest(kind, _KINDS)}")
        return [t for t in self.tensors if t.kind in kinds]

    def operators(self, *types: str) -> list["onnx.NodeProto"]:
        """The operators of some types."""
        return [n for n in self.nodes if n.op_type in types]

    def read(self, node: "onnx.NodeProto", position: int) -> QuantizedTensor | None:
        """The quantized tensor that an operator reads at a position, even through a Transpose; None if it is float."""
        if len(node.input) <= position:
            return None
        name = node.input[position]
        while (maker := self.makers.get(name)) is not None and maker.op_type == "Transpose":
            name = maker.input[0]
        return self._by_result.get(name)

    def made(self, node: "onnx.NodeProto") -> QuantizedTensor | None:
        """The quantized tensor that an operator computes, even with a bias or activation; None if it stays float."""
        name = node.output[0]
        while name not in self._by_source:
            after = self.readers.get(name, [])
            if len(after) != 1 or name in self.outputs or not self._completes(after[0]):
                return None
            name = after[0].output[0]
        return self._by_source[name]

    def bias(self, layer: "onnx.NodeProto") -> str:
        """The tensor that a layer adds to each output channel, in itself or in a sum after it; empty if none."""
        if len(layer.input) > 2:
            return layer.input[2]
        after = self.readers.get(layer.output[0], [])
        sums = [n for n in after if n.op_type == "Add" and self._completes(n)]
        return next((i for n in sums[:1] for i in n.input if i != layer.output[0]), "")

    def _completes(self, node: "onnx.NodeProto") -> bool:
        """Whether an operator is part of the layer before it: an activation, or a sum with a constant."""
        if node.op_type == "Add":
            return any(i in self.constants or self._is_stored(i) for i in node.input)
        return node.op_type in ("Relu", "Clip")

    def _is_stored(self, name: str) -> bool:
        maker = self.makers.get(name)
        return maker is not None and maker.op_type == _DQ and maker.input[0] in self.constants

    def setting(self, node: "onnx.NodeProto", name: str, default: object) -> Any:  # noqa: ANN401
        """An attribute of an operator."""
        from onnx import helper

        return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)

    @cached_property
    def shapes(self) -> dict[str, list[int | None]]:
        """The shapes of tensors that can be inferred, with None for free sizes."""
        import onnx

        inferred = onnx.shape_inference.infer_shapes(self.model).graph
        known = {}
        for value in (*inferred.value_info, *inferred.input, *inferred.output):
            if value.type.tensor_type.HasField("shape"):
                sizes = value.type.tensor_type.shape.dim
                known[value.name] = [d.dim_value if d.HasField("dim_value") else None for d in sizes]
        return known | {name: list(value.shape) for name, value in self.constants.items()}

    def output_axes(self, tensor: QuantizedTensor) -> set[int]:
        """The axes of a weight that are output channels of every layer that reads it."""
        rank = len(self.shapes.get(tensor.results[0], [])) or 2
        found = [axis for name in tensor.results for axis in self._output_axes(name, list(range(rank)))]
        return set.intersection(*({a} for a in found)) if found else set()

    def _output_axes(self, name: str, order: list[int]) -> Iterator[int]:
        """The output-channel axis of each reader; ``order`` says which axis of the weight each axis is."""
        for node in self.readers.get(name, []):
            if node.op_type == "Transpose":
                moved = self.setting(node, "perm", list(reversed(range(len(order)))))
                yield from self._output_axes(node.output[0], [order[i] for i in moved])
            elif node.op_type in LAYERS and name in node.input[1:2]:
                yield order[_output_axis(node, len(order), bool(self.setting(node, "transB", 0)))]

    def _quantized(self) -> Iterator[QuantizedTensor]:
        graph = self.model.graph
        for node in graph.node:
            if node.op_type == _Q:
                after = [n for n in self.readers.get(node.output[0], []) if n.op_type == _DQ]
                source = node.input[0]
                clips = self._clips(source)
                yield self._tensor(node, node.output[0], clips[0].input[0] if clips else source, after)
            elif node.op_type == _DQ and node.input[0] in self.constants:
                yield self._tensor(node, node.input[0], "", [node])

    def _tensor(
        self, node: "onnx.NodeProto", integers: str, source: str, after: list["onnx.NodeProto"]
    ) -> QuantizedTensor:
        results = tuple(name for n in after for name in n.output)
        scale, entry = self._scale(node), self._specs.get(integers)
        point = self.constants.get(node.input[2]) if len(node.input) > 2 else None
        kind = self._type(node, point)
        no_point = point is None or "float" in kind
        return QuantizedTensor(
            name=entry.name if entry is not None else source or next(iter(results), integers),
            kind="activation" if source else "bias" if kind == "int32" else self._role(results),
            type=kind,
            bits=_bits(kind) if entry is None else QuantSpec.parse(entry.spec).format.bits,
            scale=scale,
            zero_point=np.zeros(scale.shape, np.int64) if no_point else point.astype(np.int64),
            axis=int(self.setting(node, "axis", 1)) if scale.ndim else None,
            block=self.setting(node, "block_size", 0) or None,
            source=source,
            results=results,
        )

    def _scale(self, node: "onnx.NodeProto") -> np.ndarray:
        """A quantizer's scale; NaN if it is not constant."""
        return self.constants.get(node.input[1], np.full((), np.nan, np.float32))

    def _type(self, node: "onnx.NodeProto", point: np.ndarray | None) -> str:
        from onnx import helper

        if node.op_type == _DQ:
            return self.constants[node.input[0]].dtype.name
        if named := self.setting(node, "output_dtype", 0):
            return helper.tensor_dtype_to_np_dtype(named).name
        return point.dtype.name if point is not None else "uint8"

    def _role(self, results: tuple[str, ...]) -> Literal["activation", "weight"]:
        """The role of a stored constant for its readers."""
        for name in results:
            for node in self.readers.get(name, []):
                if node.op_type == "Transpose":
                    return self._role(tuple(node.output))
                if node.op_type in LAYERS and name in node.input[1:]:
                    return "weight"
                if node.op_type == "Gather" and name == node.input[0]:
                    return "weight"
        return "activation"

    def _clips(self, name: str) -> list["onnx.NodeProto"]:
        """The operators that clip a tensor to the integers of its quantizer, first to last."""
        found: list[onnx.NodeProto] = []
        while (maker := self.makers.get(name)) is not None and _clips_for_quantizer(maker):
            found.insert(0, maker)
            name = maker.input[0]
        return found


def _readers(graph: "onnx.GraphProto") -> dict[str, list["onnx.NodeProto"]]:
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            found.setdefault(name, []).append(node)
    return found


def _words_of(record: ExportRecord | None) -> tuple[dict[str, ExportedTensor], dict[str, str]]:
    """The quantized tensors by their integers, and the users' names of operators, as the record has them."""
    if record is None:
        return {}, {}
    return {t.tensor: t for t in record.tensors if t.tensor}, {o.node: o.name for o in record.operators}


def _clips_for_quantizer(node: "onnx.NodeProto") -> bool:
    """Whether a node's limits are those of a quantizer, which export names after it."""
    ends = {"Clip": ("low", "high"), "Max": ("low",), "Min": ("high",)}.get(node.op_type)
    return ends is not None and [i.rpartition(".")[2] for i in node.input[1:]] == list(ends)


def _output_axis(node: "onnx.NodeProto", rank: int, transposed: bool) -> int:
    if node.op_type == "MatMul":
        return rank - 1
    if node.op_type == "Gemm":
        return 0 if transposed else 1
    return 0 if node.op_type == "Conv" else 1


def _bits(kind: str) -> int:
    digits = "".join(c for c in kind if c.isdigit())
    return int(digits) if kind.startswith(("int", "uint")) else 8
