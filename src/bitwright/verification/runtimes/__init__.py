"""Runtimes: programs that execute an exported file on this machine, one file each."""

from bitwright.registry import import_all
from bitwright.verification.runtimes.base import RUNTIMES, Executed, Runtime, Session, register_runtime

import_all(__name__, __path__)

__all__ = ["RUNTIMES", "Executed", "Runtime", "Session", "register_runtime"]
