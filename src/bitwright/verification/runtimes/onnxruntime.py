"""onnxruntime: what it actually executes is read from the profile of a run, and from its optimized graph."""

import json
import math
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bitwright.files import scratch_folder
from bitwright.verification.runtimes.base import (
    RUNS,
    Arrays,
    Executed,
    Runtime,
    Session,
    loadable,
    register_runtime,
    role_of,
)

if TYPE_CHECKING:
    import onnx

    from bitwright.exporting.onnx.file import OnnxFile

_INTEGER = re.compile(r"QLinear\w+|QGemm|MatMulInteger\w*|ConvInteger|DynamicQuantize(?:MatMul|LSTM)|QAttention")
_BYTES = {"int8", "uint8", "int4", "uint4"}
_NO_KERNEL = "Could not find an implementation for"
_HINT = (
    "; it has no kernel for these types: if they are float64, let the model compute in float32 there, and "
    "leave out autocast, whose bfloat16 it does not compute"
)
_FLOATS = {"float", "double", "float16", "bfloat16"}


@register_runtime("onnxruntime")
class OnnxRuntime(Runtime):
    """onnxruntime's CPU provider, opened as ``onnxruntime.InferenceSession(path)`` opens it, but for one setting.

    With it, products of floats and stored integers compute in float32: by default the floats are rounded to 8 bits.
    """

    name = "onnxruntime"
    package = "onnxruntime"
    isolated = True
    extra = "onnx"
    formats: ClassVar[tuple[str, ...]] = ("onnx", "qoperator")
    float32_settings: ClassVar[Mapping[str, str]] = {"session.qdq_matmulnbits_accuracy_level": "1"}
    settings: Mapping[str, str] = float32_settings
    by_default = "it rounds the other factor of products with stored integers to 8 bits"
    reasons: ClassVar[Mapping[str, str]] = {"ConvTranspose": "onnxruntime has no integer transposed convolution"}

    @property
    def version(self) -> str:
        import onnxruntime

        return onnxruntime.__version__

    def session(self, file: "OnnxFile", threads: int = 0, *, as_is: bool = False) -> Session:
        """Load a file; one with an LSTM that finds ranges gets one thread, to find them for the whole batch."""
        finds_ranges = any(node.op_type == "DynamicQuantizeLSTM" for node in file.proto.graph.node)
        loaded = self._load(file, self._options(threads or int(finds_ranges), {} if as_is else self.settings))
        names = [o.name for o in loaded.get_outputs()]

        def run(feeds: Mapping[str, np.ndarray]) -> Arrays:
            return dict(zip(names, loaded.run(names, dict(feeds)), strict=True))

        return run

    def executed(self, file: "OnnxFile", feeds: Mapping[str, np.ndarray]) -> list[Executed]:
        """Run with a profile; times are the minimum of all runs except the slow first one."""
        import onnx

        with scratch_folder(tempfile.gettempdir()) as folder:
            saved = folder / "optimized.onnx"
            options = self._options(1, self.settings)
            options.enable_profiling = True
            options.profile_file_prefix = str(folder / "profile")
            options.optimized_model_filepath = str(saved)
            session = self._load(file, options)
            for _ in range(1 + RUNS):
                session.run(None, dict(feeds))
            events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
            optimized = onnx.load(str(saved), load_external_data=False)
        sources = _Sources(file.proto, optimized)
        return [_executed(event, sources) for event in _best_run(events)]

    def words_of(self, error: Exception) -> str:
        words = super().words_of(error)
        return words if _NO_KERNEL not in words or _HINT in words else f"{words}{_HINT}"

    def affects(self, kinds: Collection[str]) -> bool:
        return "MatMulNBits" in kinds

    def _options(self, threads: int, settings: Mapping[str, str]) -> Any:  # noqa: ANN401
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if threads:
            options.intra_op_num_threads = options.inter_op_num_threads = threads
        for name, value in settings.items():
            options.add_session_config_entry(name, value)
        return options

    def _load(self, file: "OnnxFile", options: object) -> Any:  # noqa: ANN401
        import onnxruntime

        with loadable(file) as content:
            return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _best_run(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The operators of the last run in a profile, each with its minimum time over all runs except the first."""
    begins = sorted(e["ts"] for e in events if e.get("name") == "model_run")
    nodes = [e for e in events if e.get("cat") == "Node" and "op_name" in e.get("args", {})]
    least: dict[str, float] = {}
    for event in nodes:
        if event["ts"] >= begins[1]:
            least[event["name"]] = min(least.get(event["name"], math.inf), event["dur"])
    return ({**e, "dur": least[e["name"]]} for e in nodes if e["ts"] >= begins[-1])


def _executed(event: dict[str, Any], sources: "_Sources") -> Executed:
    details = event["args"]
    kind = details["op_name"]
    inputs, outputs = (_types(details.get(f"{side}_type_shape", [])) for side in ("input", "output"))
    integer = bool(_INTEGER.fullmatch(kind)) or (bool(inputs) and inputs[0] in _BYTES)
    index = not {*inputs[:1], *outputs[:1]} & (_FLOATS | _BYTES)
    name = str(event["name"]).removesuffix("_kernel_time")
    return Executed(kind, role_of(kind, index=index), integer, sources.of(name), float(event["dur"]))


def _types(described: list[dict[str, Any]]) -> list[str]:
    return [next(iter(d), "") for d in described]


class _Sources:
    """Finds the operators of the file that a node of the optimized graph covers.

    These are the node of its name, and everything in the file between its result and tensors that also exist in the
    optimized graph. Integers made for others end the search, because onnxruntime renames them when it changes their
    type. If it renamed the node and its result, as for another layout, the constants that it reads identify it, or the
    node it is named after.
    """

    def __init__(self, file: "onnx.ModelProto", optimized: "onnx.ModelProto") -> None:
        self._makers = {output: node for node in file.graph.node for output in node.output}
        self._names = {node.name for node in file.graph.node}
        self._nodes = {node.name: node for node in optimized.graph.node}
        self._known = {tensor for node in optimized.graph.node for tensor in (*node.input, *node.output)}
        self._readers = _readers_of_constants(file)

    def of(self, name: str) -> tuple[str, ...]:
        """The names of the file's operators."""
        found: dict[str, None] = {name: None} if name in self._names else {}
        node = self._nodes.get(name)
        waiting = [self._makers[o] for o in node.output if o in self._makers] if node is not None else []
        while waiting:
            maker = waiting.pop()
            found[maker.name] = None
            before = [self._makers[i] for i in maker.input if i in self._makers and i not in self._known]
            waiting += [m for m in before if m.name not in found and m.op_type != "QuantizeLinear"]
        return tuple(found) or self._by_constants(node) or self._by_name(name) or self._by_reader(node)

    def _by_constants(self, node: "onnx.NodeProto | None") -> tuple[str, ...]:
        read = node.input if node is not None else ()
        candidates = [self._readers[i] for i in read if i in self._readers]
        alone = [next(iter(names)) for names in candidates if len(names) == 1]
        return tuple(dict.fromkeys(alone))

    def _by_reader(self, node: "onnx.NodeProto | None") -> tuple[str, ...]:
        """The operators covered by the layout change after it, to which onnxruntime gave the name of its result."""
        made = set(node.output) if node is not None else set()
        after = [n.name for n in self._nodes.values() if n.op_type == "ReorderOutput" and made.intersection(n.input)]
        return self.of(after[0]) if after else ()

    def _by_name(self, name: str) -> tuple[str, ...]:
        """The node after which onnxruntime named a new one."""
        while name and name not in self._names:
            name = name.rpartition("_")[0]
        return (name,) if name else ()


def _readers_of_constants(file: "onnx.ModelProto") -> dict[str, set[str]]:
    """The names of the operators that read each constant, dequantized where it is stored as integers."""
    readers: dict[str, set[str]] = {i.name: set() for i in file.graph.initializer}
    behind: dict[str, list[str]] = {}  # inputs of a dequantized constant
    for node in file.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in readers:
            behind[node.output[0]] = [i for i in node.input if i in readers]
            continue
        for name in (constant for i in node.input for constant in behind.get(i, [i])):
            if name in readers and node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
                readers[name].add(node.name)
    return readers
