"""``prepare(tune=…)``: a recipe adjusted by measuring with it."""

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from bitwright.backends import Backend
from bitwright.errors import ConfigError, suggest
from bitwright.recipe import Recipe

# Where each tuner lives. Tuning exports and runs files, which is above this layer, so it is imported only on request.
_TUNERS = {"speed": "bitwright.tuning.speed"}


def check_tuning(tune: str | None, backend: Backend) -> None:
    """Refuse what cannot be tuned for, before any work begins."""
    if tune is None:
        return
    if tune not in _TUNERS:
        raise ConfigError(f"tune cannot be {tune!r}{suggest(str(tune), _TUNERS)}")
    importlib.import_module(_TUNERS[tune]).runtime_for(backend)


def tuned(
    tune: str | None,
    model: nn.Module,
    example_inputs: object,
    recipe: Recipe,
    backend: Backend,
    concrete_args: Mapping[str, Any] | None,
) -> tuple[Recipe, list[str]]:
    """The tuned recipe, and what tuning found, in words."""
    if tune is None:
        return recipe, []
    check_tuning(tune, backend)
    tuner = importlib.import_module(_TUNERS[tune])
    result = tuner.tune_resolved(model, example_inputs, recipe, backend, concrete_args)
    return result.recipe, result.lines()
