"""plan: what prepare would do to a model, operator by operator: what was asked, what it gets, and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.preparation.ledger import Ledger, ledger_of
from bitwright.preparation.pipeline import prepare
from bitwright.recipe import Recipe


def plan(
    model: nn.Module,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    example_inputs: Any = None,  # noqa: ANN401
    backend: str | Path | Backend | None = None,
    **options: Any,
) -> Ledger:
    """Say what :func:`prepare` would do, for each operator: its rule, what is asked, what it gets, and why.

    Args:
        model: the float model; it is left untouched.
        recipe: as for ``prepare``: a Recipe, a mapping, a YAML or JSON file, or the name of a preset.
        example_inputs: as for ``prepare``; the model is captured with them.
        backend: as for ``prepare``.
        options: the other arguments of ``prepare``.

    Returns:
        The ledger, which prints itself as a table; ``entries`` has the rows.
    """
    if example_inputs is None:
        raise ConfigError("plan needs example inputs to capture the model: plan(model, recipe, example_inputs)")
    return ledger_of(prepare(model, example_inputs, backend, recipe=recipe, **options))
