"""The calibrator by the largest magnitude."""

from bitwright.calib import MaxCalibrator

__all__ = ["MaxCalibrator"]
