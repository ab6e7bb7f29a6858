"""Diagnosis: find out why a runtime computes other values than the file says, by testing one reason after another."""

from bitwright.verification.diagnosis.run import diagnose
from bitwright.verification.diagnosis.trials import TRIALS, Trial, register_trial

__all__ = ["TRIALS", "Trial", "diagnose", "register_trial"]
