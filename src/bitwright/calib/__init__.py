"""Calibrators: how the largest magnitude ("amax") of a tensor is found."""

from bitwright.calib.base import Calibrator
from bitwright.calib.histogram import HistogramCalibrator
from bitwright.calib.max import MaxCalibrator
from bitwright.calib.weights import calibrate_weights

__all__ = ["Calibrator", "HistogramCalibrator", "MaxCalibrator", "calibrate_weights"]
