"""The calibrator by the largest magnitude."""

from bitwright.quantizer.calibrators import MaxCalibrator

__all__ = ["MaxCalibrator"]
