"""Formats: how a model is written, one file each."""

from bitwright.exporting.formats.base import FORMATS, ExportFormat, ExportOptions, FileNode, LoadedFile, register_format
from bitwright.registry import import_all

import_all(__name__, __path__)

__all__ = ["FORMATS", "ExportFormat", "ExportOptions", "FileNode", "LoadedFile", "register_format"]
