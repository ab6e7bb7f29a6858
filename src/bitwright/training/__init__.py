"""Training with quantizers: a small loop, and its parts for use in your own."""

from bitwright.methods import parameter_groups as qat_parameters
from bitwright.training.average import WeightAverage
from bitwright.training.bits import change_bits
from bitwright.training.distillation import Distillation
from bitwright.training.loop import EpochResult, Training, train
from bitwright.training.oscillation import Oscillations
from bitwright.training.ranges import freeze_ranges, unfreeze_ranges
from bitwright.training.recipes import qat_recipe

__all__ = [
    "Distillation",
    "EpochResult",
    "Oscillations",
    "Training",
    "WeightAverage",
    "change_bits",
    "freeze_ranges",
    "qat_parameters",
    "qat_recipe",
    "train",
    "unfreeze_ranges",
]
