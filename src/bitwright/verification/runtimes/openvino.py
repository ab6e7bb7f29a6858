"""OpenVINO: what it really executes is read from its runtime model."""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.errors import VerifyError
from bitwright.verification.runtimes.base import Arrays, Runtime, Session, register_runtime

if TYPE_CHECKING:
    import onnx

    from bitwright.verification.onnx_file import FileOperator

_INTEGER = {"u8", "i8", "u4", "i4"}
_LAYERS = {
    "ConvTranspose": "Deconvolution",
    "Conv": "Convolution",
    "Gemm": "FullyConnected",
    "MatMul": "FullyConnected",
}


@register_runtime("openvino")
class OpenVino(Runtime):
    """OpenVINO's CPU plug-in."""

    name = "openvino"
    package = "openvino"
    extra = "openvino"

    @property
    def version(self) -> str:
        """The version of the package."""
        import openvino

        return openvino.__version__.split("-")[0]

    def session(self, model: "onnx.ModelProto", threads: int = 0) -> Session:
        """Load a model."""
        compiled = self._compile(model, threads)
        request = compiled.create_infer_request()
        names = [o.name for o in model.graph.output]
        ports = {name: port for port in compiled.outputs for name in port.get_names()}

        def run(feeds: Mapping[str, np.ndarray]) -> Arrays:
            results = request.infer(dict(feeds))
            return {name: np.array(results[ports[name]]) for name in names if name in ports}

        return run

    def executed_as(self, model: "onnx.ModelProto", operators: list["FileOperator"]) -> dict[str, tuple[bool, str]]:
        """Match operators with the layers that OpenVINO says it made of them."""
        named: dict[str, tuple[bool, str]] = {}
        nameless: dict[str, list[tuple[bool, str]]] = defaultdict(list)
        known = {n for o in operators for n in (o.name, o.output)}
        for node in self._compile(model, 1).get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            kind, precision = _read(info, "layerType"), _read(info, "runtimePrecision")
            found = (precision in _INTEGER, f"{kind} {precision}")
            names = [n.removesuffix("/WithoutBiases") for n in _read(info, "originalLayersNames").split(",")]
            if not known.intersection(names):
                nameless[kind].append(found)
            for name in names:
                named.setdefault(name, found)
        executed = {o.name: named.get(o.name) or named.get(o.output) for o in operators}
        # Some layers lose their name on the way in; they keep their order.
        for op_type, kind in _LAYERS.items():
            lost = [o for o in operators if o.op_type == op_type and executed[o.name] is None]
            if len(lost) == len(nameless[kind]):
                executed.update({o.name: found for o, found in zip(lost, nameless[kind], strict=True)})
        return {name: found or (False, "fused away") for name, found in executed.items()}

    def _compile(self, model: "onnx.ModelProto", threads: int) -> Any:  # noqa: ANN401
        import openvino

        settings = {"INFERENCE_NUM_THREADS": threads} if threads else {}
        core = openvino.Core()
        try:
            return core.compile_model(core.read_model(model.SerializeToString()), "CPU", settings)
        except Exception as error:
            raise VerifyError(f"OpenVINO refuses the file: {str(error).strip().splitlines()[-1]}") from error


def _read(info: Any, key: str) -> str:  # noqa: ANN401
    return str(info[key].value) if key in info else ""
