"""Bitwright quantizes PyTorch models, writes the file the hardware runs, and proves that the two agree."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitwright.analyze import analyze
    from bitwright.calibrate import calibrate
    from bitwright.export import export
    from bitwright.graph import InputMatchType, MatcherNode, ReplacePatternBase, ReplaceStrategy, register_schedule
    from bitwright.prepare import ledger_of, prepare
    from bitwright.quantizer import QuantDescriptor, TensorQuantizer
    from bitwright.recipe import Recipe, Rule
    from bitwright.report import report
    from bitwright.spec import QuantSpec
    from bitwright.swap_modules import swap_modules
    from bitwright.verify import run_file, verify

__version__ = "0.1.0"

# Names load on first use, so that `import bitwright` costs nothing and `bitwright --help` needs no torch.
_HOMES = {
    "calibrate": "bitwright.calibrate",
    "export": "bitwright.export",
    "analyze": "bitwright.analyze",
    "ledger_of": "bitwright.prepare",
    "report": "bitwright.report",
    "run_file": "bitwright.verify",
    "verify": "bitwright.verify",
    "swap_modules": "bitwright.swap_modules",
    "prepare": "bitwright.prepare",
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
    "export",
    "ledger_of",
    "prepare",
    "register_schedule",
    "report",
    "run_file",
    "swap_modules",
    "verify",
]


class _Package(ModuleType):
    """A package whose functions may bear the names of the modules they live in: the function wins."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name not in _HOMES:
            raise AttributeError(f"module 'bitwright' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


sys.modules[__name__].__class__ = _Package
