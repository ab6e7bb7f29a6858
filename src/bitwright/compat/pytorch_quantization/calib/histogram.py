"""The calibrator by histograms, and that of weights."""

from bitwright.calib import HistogramCalibrator, calibrate_weights

__all__ = ["HistogramCalibrator", "calibrate_weights"]
