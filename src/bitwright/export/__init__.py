"""Export: the file that the target runs."""

from bitwright.export.onnx import export

__all__ = ["export"]
