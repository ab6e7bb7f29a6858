"""Analyze: how quantization affects every operator of a calibrated model: error, clipping, distribution."""

from bitwright.analysis.run import analyze, outline
from bitwright.analysis.stats import Analysis, Histogram, LayerStats, TensorStats

__all__ = ["Analysis", "Histogram", "LayerStats", "TensorStats", "analyze", "outline"]
