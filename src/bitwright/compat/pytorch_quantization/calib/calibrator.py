"""What every calibrator is, under its old name."""

from bitwright.quantizer.calibrators import Calibrator

_Calibrator = Calibrator

__all__ = ["_Calibrator"]
