"""Bitwright quantizes PyTorch models, writes the file the hardware runs, and proves that the two agree."""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from bitwright.garbage import gc_paused as _gc_paused

if TYPE_CHECKING:
    from bitwright.analysis import analyze
    from bitwright.bit_search import search_bits, sensitivity
    from bitwright.correction import (
        calibrate,
        correct,
        correct_bias,
        correct_bias_analytically,
        equalize,
        fit_weight_ranges,
        gptq,
        reestimate_norms,
        smooth,
    )
    from bitwright.errors import BitwrightError
    from bitwright.exporting import export
    from bitwright.graph import (
        InputMatchType,
        MatcherNode,
        ReplacePatternBase,
        ReplaceStrategy,
        explain_capture,
        register_schedule,
    )
    from bitwright.mapped_weights import map_weights
    from bitwright.module_swap import swap_modules
    from bitwright.nn.norm import freeze_batchnorm, unfreeze_batchnorm
    from bitwright.preparation import ledger_of, plan, prepare
    from bitwright.quantizer import QuantDescriptor, TensorQuantizer, float_state_dict
    from bitwright.recipe import Recipe, Rule
    from bitwright.reconstruction import calibrate_by_block, reconstruct
    from bitwright.reporting import report
    from bitwright.saving import load, save
    from bitwright.simulation import simulate
    from bitwright.spec import QuantSpec
    from bitwright.training import train
    from bitwright.tuning import tune_speed
    from bitwright.verification import run_file, verify

__version__ = "0.1.0"

# Names load on first use, so that `import bitwright` costs nothing and `bitwright --help` needs no torch.
_HOMES = {
    "calibrate": "bitwright.correction",
    "calibrate_by_block": "bitwright.reconstruction",
    "map_weights": "bitwright.mapped_weights",
    "correct": "bitwright.correction",
    "correct_bias": "bitwright.correction",
    "correct_bias_analytically": "bitwright.correction",
    "equalize": "bitwright.correction",
    "smooth": "bitwright.correction",
    "fit_weight_ranges": "bitwright.correction",
    "gptq": "bitwright.correction",
    "reestimate_norms": "bitwright.correction",
    "export": "bitwright.exporting",
    "explain_capture": "bitwright.graph",
    "float_state_dict": "bitwright.quantizer",
    "freeze_batchnorm": "bitwright.nn.norm",
    "unfreeze_batchnorm": "bitwright.nn.norm",
    "analyze": "bitwright.analysis",
    "ledger_of": "bitwright.preparation",
    "load": "bitwright.saving",
    "reconstruct": "bitwright.reconstruction",
    "search_bits": "bitwright.bit_search",
    "sensitivity": "bitwright.bit_search",
    "train": "bitwright.training",
    "tune_speed": "bitwright.tuning",
    "report": "bitwright.reporting",
    "run_file": "bitwright.verification",
    "save": "bitwright.saving",
    "simulate": "bitwright.simulation",
    "verify": "bitwright.verification",
    "swap_modules": "bitwright.module_swap",
    "plan": "bitwright.preparation",
    "prepare": "bitwright.preparation",
    "BitwrightError": "bitwright.errors",
    "InputMatchType": "bitwright.graph",
    "MatcherNode": "bitwright.graph",
    "ReplacePatternBase": "bitwright.graph",
    "ReplaceStrategy": "bitwright.graph",
    "register_schedule": "bitwright.graph",
    "QuantDescriptor": "bitwright.quantizer",
    "TensorQuantizer": "bitwright.quantizer",
    "Recipe": "bitwright.recipe",
    "Rule": "bitwright.recipe",
    "QuantSpec": "bitwright.spec",
}

__all__ = [
    "BitwrightError",
    "InputMatchType",
    "MatcherNode",
    "QuantDescriptor",
    "QuantSpec",
    "Recipe",
    "ReplacePatternBase",
    "ReplaceStrategy",
    "Rule",
    "TensorQuantizer",
    "analyze",
    "calibrate",
    "calibrate_by_block",
    "correct",
    "correct_bias",
    "correct_bias_analytically",
    "equalize",
    "explain_capture",
    "export",
    "fit_weight_ranges",
    "float_state_dict",
    "freeze_batchnorm",
    "gptq",
    "ledger_of",
    "load",
    "map_weights",
    "plan",
    "prepare",
    "reconstruct",
    "reestimate_norms",
    "register_schedule",
    "report",
    "run_file",
    "save",
    "search_bits",
    "sensitivity",
    "simulate",
    "smooth",
    "swap_modules",
    "train",
    "tune_speed",
    "unfreeze_batchnorm",
    "verify",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOMES:
        near = difflib.get_close_matches(name, _HOMES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'bitwright' has no attribute {name!r}{hint}")
    with _gc_paused():  # importing all of it is quicker than looking through all that torch holds
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
