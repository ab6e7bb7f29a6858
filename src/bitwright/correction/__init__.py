"""Cheap correctors: steps that recover accuracy of a calibrated model in seconds, in place.

Each is one function of a model and of batches; :func:`calibrate` runs those that a recipe lists under ``correct``. They
change the model's own parameters and the ranges of its quantizers, so export and verify need not know about them.
"""

from bitwright.correction.analytic_bias import correct_bias_analytically
from bitwright.correction.bias import correct_bias
from bitwright.correction.calibrate import calibrate
from bitwright.correction.equalization import equalize
from bitwright.correction.gptq import gptq
from bitwright.correction.norms import reestimate_norms
from bitwright.correction.outcome import Correction
from bitwright.correction.smoothing import smooth
from bitwright.correction.steps import correct
from bitwright.correction.weight_ranges import fit_weight_ranges

__all__ = [
    "Correction",
    "calibrate",
    "correct",
    "correct_bias",
    "correct_bias_analytically",
    "equalize",
    "fit_weight_ranges",
    "gptq",
    "reestimate_norms",
    "smooth",
]
