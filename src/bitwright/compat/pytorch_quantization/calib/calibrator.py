"""What every calibrator is, under its old name."""

from bitwright.calib import Calibrator

_Calibrator = Calibrator

__all__ = ["_Calibrator"]
