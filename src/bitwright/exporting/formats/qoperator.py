"""ONNX of integer operators (QLinearConv, QGemm, …), for tools that do not join operators with Q/DQ themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from bitwright.exporting.deploy import Deployment
from bitwright.exporting.formats.base import ExportFormat, ExportOptions, LoadedFile, register_format
from bitwright.exporting.formats.onnx import OnnxFormat, build
from bitwright.exporting.parts import refuse_tables
from bitwright.exporting.record import ExportRecord
from bitwright.graph import Inputs


@register_format("qoperator")
class QOperatorFormat(ExportFormat):
    """The Q/DQ file after onnxruntime has joined operators with their quantizers, for any CPU.

    Standard operators where ONNX has them (QLinearConv, QLinearMatMul), those of the domain com.microsoft otherwise.
    What has no integer operator stays between quantizers.
    """

    name = "qoperator"
    suffix = ".onnx"
    packages: ClassVar[dict[str, str]] = {"onnx": "onnx", "onnxscript": "onnx", "onnxruntime": "onnx"}

    def write(self, deployment: Deployment, inputs: Inputs, target: Path, options: ExportOptions) -> ExportRecord:
        from bitwright.exporting.onnx.qoperator import join_quantizers
        from bitwright.exporting.onnx.seal import write_recorded

        refuse_tables(deployment.model, "and integer operators multiply evenly spaced integers only")
        proto, record = build(deployment, inputs, replace(options, unsigned_activations=True), self.name)
        joined = join_quantizers(proto)
        joined.producer_name = proto.producer_name
        return write_recorded(joined, record, target, options.external_data)

    def read(self, path: Path) -> LoadedFile:
        return OnnxFormat().read(path)

    def restore(self, file: Any) -> LoadedFile:
        """The file, which knows what its integer operators were made of."""
        from bitwright.exporting.onnx.qoperator import QOperatorFile

        return QOperatorFile(file.path, file.proto, file.record, file.size)
