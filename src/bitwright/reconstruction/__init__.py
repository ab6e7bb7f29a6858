"""Reconstruction: learn how weights are rounded so that few bits keep their accuracy (AdaRound, BRECQ, QDrop)."""

from bitwright.reconstruction.blockwise import calibrate_by_block
from bitwright.reconstruction.result import Reconstruction, UnitResult
from bitwright.reconstruction.run import reconstruct

__all__ = ["Reconstruction", "UnitResult", "calibrate_by_block", "reconstruct"]
