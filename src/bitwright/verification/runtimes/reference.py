"""reference: onnxruntime without any optimization, for targets that no runtime here executes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.verification.runtimes.base import Executed, register_runtime
from bitwright.verification.runtimes.onnxruntime import OnnxRuntime

if TYPE_CHECKING:
    from bitwright.exporting.onnx.file import OnnxFile


@register_runtime("reference")
class Reference(OnnxRuntime):
    """Every operator as ONNX defines it, including quantizers: the target's values, but nobody's kernels."""

    name = "reference"
    isolated = True
    stands_in = True

    def executed(self, file: "OnnxFile", feeds: Mapping[str, np.ndarray]) -> list[Executed]:
        """Nothing, as this would not represent the target."""
        return []

    def _options(self, threads: int, settings: Mapping[str, str]) -> Any:  # noqa: ANN401
        import onnxruntime

        options = super()._options(threads, settings)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options
