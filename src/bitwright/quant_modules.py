"""Replace the layers of ``torch.nn`` by quantized ones before a model is built, and put them back."""

from collections.abc import Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from torch import nn

from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.nn.registry import QMODULES, is_custom

Replacement = tuple[ModuleType, str, type[nn.Module]]


_originals: list[tuple[ModuleType, str, Any]] = []


def initialize(
    float_module_list: Iterable[str] | None = None, custom_quant_modules: Iterable[Replacement] | None = None
) -> ExitStack:
    """Replace ``torch.nn.Conv2d`` and the like by their quantized versions, so that a model built now is quantized.

    ::

        with quant_modules.initialize():
            model = torchvision.models.resnet18()

    Args:
        float_module_list: names of layers that stay float, such as ``["Linear"]``.
        custom_quant_modules: more replacements, as (module, name in it, class); they win over ``float_module_list``.

    Returns:
        A context that calls :func:`deactivate` on exit.
    """
    if _originals:
        raise ConfigError("quant_modules is initialized already; deactivate() it first")
    stay = [float_module_list] if isinstance(float_module_list, str) else float_module_list or ()
    for (place, name), cls in _wanted(stay, custom_quant_modules or ()).items():
        _originals.append((place, name, getattr(place, name)))
        setattr(place, name, cls)
    leaving = ExitStack()
    leaving.callback(deactivate)
    return leaving


def _wanted(stay: Iterable[str], custom: Iterable[Replacement]) -> dict[tuple[ModuleType, str], type[nn.Module]]:
    """The classes that will replace others, by place and name."""
    defaults = replaceable()
    for name in stay:
        if defaults.pop(name, None) is None:
            raise UnknownNameError(f"no layer named {name!r} would be replaced{suggest(name, replaceable())}")
    wanted: dict[tuple[ModuleType, str], type[nn.Module]] = {(nn, name): cls for name, cls in defaults.items()}
    for place, name, cls in custom:
        if not hasattr(place, name):
            raise UnknownNameError(f"{place.__name__} has no {name!r} to replace{suggest(name, vars(place))}")
        wanted[place, name] = cls
    return wanted


def deactivate() -> None:
    """Restore the original classes; does nothing if they are in place."""
    while _originals:
        place, name, original = _originals.pop()
        setattr(place, name, original)


def replaceable() -> dict[str, type[nn.Module]]:
    """The layers of ``torch.nn`` that are replaced by default, by name, and their replacements."""
    return {
        source.__name__: cls
        for source, cls in QMODULES.items()
        if isinstance(source, type) and getattr(nn, source.__name__, None) is source
        if not is_custom(cls) and getattr(cls, "by_default", True)
    }
