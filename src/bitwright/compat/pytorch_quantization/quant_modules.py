"""Replace the layers of ``torch.nn`` by quantized ones: those that the old toolkit replaces."""

from collections.abc import Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import NamedTuple

from torch import nn

from bitwright import quant_modules as _ours
from bitwright.compat.pytorch_quantization import nn as quant_nn
from bitwright.compat.pytorch_quantization.onnx_export import enable_onnx_export
from bitwright.quant_modules import Replacement, deactivate, replaceable

_WITH_SIZES = ("Conv", "ConvTranspose", "AvgPool", "AdaptiveAvgPool")
REPLACED = (*(f"{name}{d}d" for name in _WITH_SIZES for d in (1, 2, 3)), "Linear", "LSTM", "LSTMCell")


def initialize(
    float_module_list: Iterable[str] | None = None, custom_quant_modules: Iterable[Replacement] | None = None
) -> ExitStack:
    """Let ``torch.nn.Conv2d`` and its like be their quantized versions; a second call replaces the first.

    Args:
        float_module_list: names of layers that stay float.
        custom_quant_modules: more replacements, as (module, name in it, class); they win over ``float_module_list``.
    """
    deactivate()
    possible, left = replaceable(), list(float_module_list or ())
    # A layer that is never replaced may be named: it stays float indeed. A name that torch does not know is refused.
    ours = dict.fromkeys([*possible, *(name for name in left if not hasattr(nn, name))])
    old = [entry for entry in _entries() if entry.mod_name not in left]
    return _ours.initialize(ours, [*old, *(custom_quant_modules or ())])


class QuantEntry(NamedTuple):
    """A name in a module, and the class that takes its place."""

    orig_mod: ModuleType
    mod_name: str
    replace_mod: type[nn.Module]


def _entries() -> list[QuantEntry]:
    return [QuantEntry(nn, name, getattr(quant_nn, name)) for name in REPLACED]


class QuantModuleReplacementHelper:
    """The same in two steps: ``prepare_state`` says what is replaced, ``apply_quant_modules`` does it.

    Attributes:
        default_quant_map: what is replaced where nothing is said.
        quant_map: what ``apply_quant_modules`` will replace.
        orginal_func_map: what was there before.
    """

    def __init__(self) -> None:
        self.default_quant_map = _entries()
        self.quant_map: set[QuantEntry] = set()
        self.orginal_func_map: set[QuantEntry] = set()

    def prepare_state(
        self, float_module_list: Iterable[str] | None = None, custom_map: Iterable[Replacement] | None = None
    ) -> None:
        """Choose what is replaced; arguments as for ``initialize``."""
        left = set(float_module_list or ())
        chosen = [entry for entry in self.default_quant_map if entry.mod_name not in left]
        self.quant_map = {*chosen, *(QuantEntry(*item) for item in custom_map or ())}
        self.orginal_func_map = {QuantEntry(e[0], e[1], getattr(e[0], e[1])) for e in self.quant_map}

    def apply_quant_modules(self) -> None:
        """Replace."""
        for entry in self.quant_map:
            setattr(entry.orig_mod, entry.mod_name, entry.replace_mod)

    def restore_float_modules(self) -> None:
        """Put back what was there."""
        for entry in self.orginal_func_map:
            setattr(entry.orig_mod, entry.mod_name, entry.replace_mod)


__all__ = ["deactivate", "enable_onnx_export", "initialize"]
