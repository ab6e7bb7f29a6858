"""onnxruntime: what it really executes is read from the graph it saves after its own optimization."""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bitwright.errors import VerifyError
from bitwright.verification import onnx_file
from bitwright.verification.runtimes.base import Arrays, Runtime, Session, register_runtime

if TYPE_CHECKING:
    import onnx

    from bitwright.verification.onnx_file import FileOperator

_INTEGER = re.compile(r"QLinear\w+|QGemm|MatMulInteger\w*|ConvInteger|DynamicQuantizeMatMul|QAttention")
_SUFFIX = re.compile(r"(_token_\d+|_transformed|_nchwc|_nhwc|_fused|/?MatMul_?AddFusion)+$")


@register_runtime("onnxruntime")
class OnnxRuntime(Runtime):
    """onnxruntime's CPU provider."""

    name = "onnxruntime"
    package = "onnxruntime"
    extra = "onnx"
    reasons: ClassVar[Mapping[str, str]] = {"ConvTranspose": "onnxruntime has no integer transposed convolution"}

    @property
    def version(self) -> str:
        """The version of the package."""
        import onnxruntime

        return onnxruntime.__version__

    def session(self, model: "onnx.ModelProto", threads: int = 0) -> Session:
        """Load a model."""
        loaded = self._load(model, self._options(threads))
        names = [o.name for o in loaded.get_outputs()]

        def run(feeds: Mapping[str, np.ndarray]) -> Arrays:
            return dict(zip(names, loaded.run(names, dict(feeds)), strict=True))

        return run

    def executed_as(self, model: "onnx.ModelProto", operators: list["FileOperator"]) -> dict[str, tuple[bool, str]]:
        """Match operators with the nodes of the optimized graph by their names."""
        import onnx

        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "optimized.onnx"
            options = self._options(1)
            options.optimized_model_filepath = str(saved)
            self._load(model, options)
            optimized = onnx.load(str(saved))
        by_name: dict[str, str] = {}
        for node in optimized.graph.node:
            for name in (*node.output, node.name, _SUFFIX.sub("", node.name)):
                if node.op_type not in ("QuantizeLinear", "DequantizeLinear", "Transpose"):
                    by_name.setdefault(name, node.op_type)
        found = {}
        for operator in operators:
            run = by_name.get(operator.name) or by_name.get(operator.output, "")
            found[operator.name] = (bool(_INTEGER.fullmatch(run)), run or "fused away")
        return found

    def _options(self, threads: int) -> Any:  # noqa: ANN401
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Else it turns int8 activations into uint8 by itself, and breaks files in which a pool carries a scale (1.31).
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        if threads:
            options.intra_op_num_threads = options.inter_op_num_threads = threads
        return options

    def _load(self, model: "onnx.ModelProto", options: Any) -> Any:  # noqa: ANN401
        import onnxruntime

        if onnx_file.has_fp8(model):  # it would make integer operators of them, and then refuse its own work
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise VerifyError(f"onnxruntime refuses the file: {str(error).splitlines()[0]}") from error
