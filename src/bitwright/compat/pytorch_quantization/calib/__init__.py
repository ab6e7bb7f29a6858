"""Calibrators, under the old names of their modules."""

from bitwright.compat.pytorch_quantization.calib import calibrator, histogram, max
from bitwright.compat.pytorch_quantization.calib.histogram import HistogramCalibrator, calibrate_weights
from bitwright.compat.pytorch_quantization.calib.max import MaxCalibrator
