"""Calibrators, under the old names of their modules."""

from bitwright.compat.old_paths import add_paths
from bitwright.compat.pytorch_quantization.calib import histogram
from bitwright.compat.pytorch_quantization.calib.histogram import HistogramCalibrator, calibrate_weights
from bitwright.quantizer.calibrators import Calibrator as _Calibrator
from bitwright.quantizer.calibrators import MaxCalibrator

add_paths(__name__, {"calibrator": "_Calibrator", "max": "MaxCalibrator"})
