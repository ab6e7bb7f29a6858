"""Diagnosis: find out why a runtime gives other values than the file says, by trying reasons one after the other."""

from bitwright.verification.diagnosis.run import diagnose
from bitwright.verification.diagnosis.trials import TRIALS, Trial, register_trial

__all__ = ["TRIALS", "Trial", "diagnose", "register_trial"]
