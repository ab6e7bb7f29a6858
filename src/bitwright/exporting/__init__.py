"""Exporting: the file that the target runs, with a record that maps it to the model."""

from bitwright.exporting.fingerprint import Fingerprint
from bitwright.exporting.formats import FORMATS, ExportFormat, ExportOptions, FileNode, LoadedFile, register_format
from bitwright.exporting.pipeline import export
from bitwright.exporting.record import ExportedFile, ExportedOperator, ExportedTensor, ExportRecord

__all__ = [
    "FORMATS",
    "ExportFormat",
    "ExportOptions",
    "ExportRecord",
    "ExportedFile",
    "ExportedOperator",
    "ExportedTensor",
    "FileNode",
    "Fingerprint",
    "LoadedFile",
    "export",
    "register_format",
]
