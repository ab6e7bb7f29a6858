"""A bundle that was read: the Q/DQ model that its files describe."""

from pathlib import Path

import onnx

from bitwright.exporting.contents import Contents
from bitwright.exporting.onnx.contents import add_contents
from bitwright.exporting.onnx.file import OnnxFile


class BundleFile(OnnxFile):
    """The Q/DQ model, made of a float model and ranges."""

    stands_in = True

    def __init__(self, file: OnnxFile, joined: onnx.ModelProto, files: list[Path]) -> None:
        super().__init__(file.path, joined, file.record, sum(f.stat().st_size for f in files))
        self.clean, self.files = file, files

    def contents(self) -> dict[str, str]:
        """Those of the float model, and the files of ranges."""
        found = Contents()
        add_contents(self.clean.proto, found)
        for path in self.files[1:]:
            found.add(f"the file {path.name}", path.read_bytes())
        return found.digests

    def float_twin(self) -> OnnxFile:
        return OnnxFile(self.path, self.clean.proto, None)
