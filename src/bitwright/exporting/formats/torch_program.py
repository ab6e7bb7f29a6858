"""A program of ``torch.export`` with torch's own quantizers, for PyTorch without ONNX: inductor runs it in integers."""

from pathlib import Path

from torch import nn

from bitwright.errors import ConfigError
from bitwright.exporting.deploy import Deployment
from bitwright.exporting.formats.base import ExportFormat, ExportOptions, LoadedFile, register_format
from bitwright.exporting.record import ExportRecord
from bitwright.graph import Inputs

_OF_ONNX = ("input_names", "output_names", "opset_version", "model_name", "external_data")


@register_format("torch")
class TorchFormat(ExportFormat):
    """A ``.pt2`` archive that ``torch.export.load`` reads, with integers of up to 16 bits; the record is in it."""

    name = "torch"
    suffix = ".pt2"
    checkable = False

    def check(self, model: nn.Module, inputs: Inputs, options: ExportOptions) -> None:
        for name in _OF_ONNX:
            if getattr(options, name) is not None:
                raise ConfigError(f"{name} is for ONNX files, not for the format torch: leave it out")
        super().check(model, inputs, options)

    def write(self, deployment: Deployment, inputs: Inputs, target: Path, options: ExportOptions) -> ExportRecord:
        from bitwright.exporting.torch_program.build import build
        from bitwright.exporting.torch_program.file import write_sealed

        program, record, origin = build(deployment, inputs, options, self.name)
        write_sealed(program, record, origin, target)
        return record

    def read(self, path: Path) -> LoadedFile:
        from bitwright.exporting.torch_program.file import ProgramFile

        return ProgramFile.read(path)
