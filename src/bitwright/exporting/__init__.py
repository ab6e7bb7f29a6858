"""Export: the file that the target runs."""

from bitwright.exporting.onnx import export

__all__ = ["export"]
