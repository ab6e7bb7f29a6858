"""A bundle that was read: the Q/DQ model that its files describe."""

from pathlib import Path

import onnx

from bitwright.exporting.onnx.file import OnnxFile


class BundleFile(OnnxFile):
    """The Q/DQ model, made of a float model and ranges.

    Attributes:
        clean: the float model.
        files: all files of the bundle.
    """

    stands_in = True

    def __init__(self, file: OnnxFile, joined: onnx.ModelProto, files: list[Path]) -> None:
        super().__init__(file.path, joined, file.record, sum(f.stat().st_size for f in files))
        self.clean, self.files = file, files

    def float_twin(self) -> OnnxFile:
        return OnnxFile(self.path, self.clean.proto, None)
