"""The user's wishes for quantization, checked before any work begins."""

from collections.abc import Iterable
from pathlib import Path

from bitwright.backends import Backend
from bitwright.preparation import resolve_recipe
from bitwright.recipe import Recipe


def read_wishes(
    backend: str | None,
    recipe: Path | None,
    weight: str | None,
    activation: str | None,
    skip: Iterable[str] | None,
) -> tuple[Backend, Recipe]:
    """Return the backend and the whole recipe, or refuse what the backend could not do."""
    wishes, target = resolve_recipe(backend, recipe, weight, activation, skip or ())
    return target, wishes
