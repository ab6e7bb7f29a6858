"""Tuning: decide what a recipe leaves open by measuring files."""

from bitwright.tuning.result import LeftFloat, SpeedTuning
from bitwright.tuning.speed import tune_speed

__all__ = ["LeftFloat", "SpeedTuning", "tune_speed"]
