"""Analyze: what quantization does to every operator of a calibrated model: error, clipping, distribution."""

from bitwright.analyze.run import analyze, outline
from bitwright.analyze.stats import Histogram, LayerStats, TensorStats

__all__ = ["Histogram", "LayerStats", "TensorStats", "analyze", "outline"]
