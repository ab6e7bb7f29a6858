"""OpenVINO: what it actually executes is read from its runtime model and the counters of a run."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bitwright.signals import signal_stack_kept
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
    from bitwright.exporting.onnx.file import OnnxFile

_BYTES = {"u8", "i8", "u4", "i4", "u1"}
_INDICES = {"i32", "i64", "u32", "u64", "boolean"}
_NEW_NAME = "/"  # separates the node's name from the suffix of what OpenVINO derives from it


@register_runtime("openvino")
class OpenVino(Runtime):
    """OpenVINO's CPU plug-in, with float32 where it computes in float.

    Its default is bf16 on CPUs that have it, and 8 bits for the inputs of layers with stored integers.
    """

    name = "openvino"
    package = "openvino"
    isolated = True
    extra = "openvino"
    formats: ClassVar[tuple[str, ...]] = ("onnx", "openvino")
    float32_settings: ClassVar[Mapping[str, str]] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    }
    settings: Mapping[str, str] = float32_settings
    by_default = "it computes float parts in less than float32, or rounds the inputs of layers with stored integers"
    hazards: ClassVar[Mapping[str, str]] = {
        "ONEDNN_MAX_CPU_ISA": "OpenVINO then mixes kernels for this CPU and for older ones, and may fail"
    }

    @property
    def version(self) -> str:
        import openvino

        return openvino.__version__.split("-")[0]

    def session(self, file: "OnnxFile", threads: int = 0, *, as_is: bool = False) -> Session:
        compiled = self._compile(file, {} if as_is else dict(self.settings), threads)
        request = compiled.create_infer_request()
        ports = {name: port for port in compiled.outputs for name in port.get_names()}

        def run(feeds: Mapping[str, np.ndarray]) -> Arrays:
            results = request.infer(_read_inputs(compiled, feeds))
            return {name: np.array(results[ports[name]]) for name in file.outputs if name in ports}

        return run

    def executed(self, file: "OnnxFile", feeds: Mapping[str, np.ndarray]) -> list[Executed]:
        """Read the runtime model, which has the operators left after fusing; times are the minimum of several runs."""
        compiled = self._compile(file, {**self.settings, "PERF_COUNT": "YES"}, 1)
        request = compiled.create_infer_request()
        times: dict[str, float] = {}
        for run in range(1 + RUNS):
            request.infer(_read_inputs(compiled, feeds))
            for c in request.get_profiling_info() if run else ():
                times[c.node_name] = min(times.get(c.node_name, math.inf), c.real_time.total_seconds() * 1e6)
        nodes = file.nodes()
        owners = {name: node.name for node in nodes for name in node.outputs} | {node.name: node.name for node in nodes}
        found = []
        for node in compiled.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            kind, precision = _read(info, "layerType"), _read(info, "runtimePrecision")
            index = {precision, *_read(info, "outputPrecisions").split(",")} <= _INDICES
            sources = [_source(name, owners) for name in _read(info, "originalLayersNames").split(",")]
            found.append(
                Executed(
                    f"{kind} {precision}",
                    role_of(kind, index=index),
                    precision in _BYTES,
                    tuple(dict.fromkeys(owners[s] for s in sources if s)),
                    times.get(node.get_friendly_name(), 0.0),
                )
            )
        return found

    def default_precision(self) -> str:
        import openvino

        hint = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT")
        name = hint.get_type_name() if hasattr(hint, "get_type_name") else str(hint)
        return "" if name in ("f32", "dynamic", "") else name

    def _compile(self, file: "OnnxFile", settings: dict[str, Any], threads: int) -> Any:  # noqa: ANN401
        import openvino

        if threads:
            settings["INFERENCE_NUM_THREADS"] = threads
        core = openvino.Core()
        with loadable(file) as content, signal_stack_kept():
            return core.compile_model(core.read_model(content), "CPU", settings)


def _read_inputs(compiled: Any, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:  # noqa: ANN401
    """The inputs that a compiled model has left; it drops those that nothing reads, and refuses values for them."""
    names = [port.get_names() for port in compiled.inputs]
    unnamed = [sorted(known) for known in names if not known & feeds.keys()]
    if unnamed:
        raise RuntimeError(f"it asks for the inputs {unnamed}, and the file has {', '.join(feeds)}")
    return {name: value for name, value in feeds.items() if any(name in known for known in names)}


def _source(name: str, known: Mapping[str, str]) -> str:
    """The node or tensor of the file behind a name of OpenVINO's: itself, or the longest it starts with."""
    while name and name not in known:
        name = name.rpartition(_NEW_NAME)[0]
    return name


def _read(info: Any, key: str) -> str:  # noqa: ANN401
    return str(info[key].value) if key in info else ""
