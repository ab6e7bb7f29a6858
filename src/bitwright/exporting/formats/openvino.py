"""OpenVINO IR: a graph (.xml) and its tensors (.bin), made of the Q/DQ model by OpenVINO's own reader of ONNX."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import ClassVar

from torch import nn

from bitwright.errors import ConfigError, ExportError, useful_line
from bitwright.exporting.deploy import Deployment
from bitwright.exporting.formats.base import ExportFormat, ExportOptions, LoadedFile, register_format
from bitwright.exporting.formats.onnx import build
from bitwright.exporting.record import ExportRecord
from bitwright.graph import Inputs


@register_format("openvino")
class OpenVinoFormat(ExportFormat):
    """What OpenVINO would make of the ONNX file when it opens it; the record is in its ``rt_info``."""

    name = "openvino"
    suffix = ".xml"
    checkable = False
    packages: ClassVar[dict[str, str]] = {"onnx": "onnx", "onnxscript": "onnx", "openvino": "openvino"}

    def check(self, model: nn.Module, inputs: Inputs, options: ExportOptions) -> None:
        if options.external_data is False:
            raise ConfigError("the format openvino stores tensors in a second file: leave out external_data=False")
        super().check(model, inputs, options)

    def write(self, deployment: Deployment, inputs: Inputs, target: Path, options: ExportOptions) -> ExportRecord:
        import openvino

        from bitwright.exporting.onnx.external import LIMIT, stored_bytes
        from bitwright.exporting.onnx.file import OnnxFile
        from bitwright.exporting.openvino_ir import ORIGIN, OWNER, RECORD, write_sealed

        proto, record = build(deployment, inputs, options, self.name)
        if stored_bytes(proto) > LIMIT:
            raise ExportError("the model is larger than 2 GB: export it as ONNX, and let OpenVINO convert it")
        try:
            model = openvino.Core().read_model(proto.SerializeToString())
        except Exception as error:
            raise ExportError(f"OpenVINO cannot convert the model: {useful_line(error)}") from error
        source = OnnxFile(target, proto, record)
        nodes = [astuple(node) for node in source.nodes()]
        origin = {"inputs": source.inputs, "outputs": source.outputs, "nodes": nodes}
        model.set_rt_info(record.to_json(), [OWNER, RECORD])
        model.set_rt_info(json.dumps(origin, separators=(",", ":")), [OWNER, ORIGIN])
        write_sealed(model, target)
        return record

    def read(self, path: Path) -> LoadedFile:
        from bitwright.exporting.openvino_ir import IrFile

        return IrFile.read(path)

    def files(self, target: Path) -> list[Path]:
        """The graph and the tensors; OpenVINO finds these by their name."""
        if target.suffix != self.suffix:
            raise ConfigError(f"the name of an OpenVINO IR ends in {self.suffix}, and {target.name!r} does not")
        return [target, target.with_suffix(".bin")]
