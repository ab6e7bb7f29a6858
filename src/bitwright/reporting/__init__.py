"""Report: one self-contained HTML page with the proof, and what quantization did to every layer."""

from bitwright.reporting.page import report

__all__ = ["report"]
