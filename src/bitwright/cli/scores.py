"""Scores: the results of the user's ``--eval`` function on the float model, the simulation and the file."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn

from bitwright.cli.boundary import users_code
from bitwright.errors import ConfigError
from bitwright.modes import eval_mode

Scores = dict[str, float]


class DeployedModel(nn.Module):
    """A file in its runtime, wrapped as a module so that ``model.eval()`` in a user's function works."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        return self._run(*args, **kwargs)


def score(evaluate: Callable[[nn.Module], Any], model: nn.Module, name: str, like: Scores | None = None) -> Scores:
    """Call the user's function and read a number, or a dict of numbers with the same names as ``like``."""
    with eval_mode(model), torch.no_grad(), users_code(name):
        found = evaluate(model)
    scores = dict(found) if isinstance(found, Mapping) else {"score": found}
    if not scores:
        raise ConfigError(f"{name} must return a number or a dict of numbers, but it returned an empty dict")
    numbers = {str(key): _number(value, name) for key, value in scores.items()}
    if like and list(like) != list(numbers):
        raise ConfigError(f"{name} returned {', '.join(numbers)}, but {', '.join(like)} before")
    return numbers


def _number(value: object, name: str) -> float:
    if hasattr(value, "item"):  # a tensor or a numpy scalar
        with users_code(name):
            value = value.item()
    if not isinstance(value, Real):
        raise ConfigError(f"{name} must return a number or a dict of numbers, but it returned {type(value).__name__}")
    return float(value)


def missed_drop(before: Scores, after: Mapping[str, Scores], allowed: float) -> list[str]:
    """Say in which runtimes the first score drops by more than ``allowed``."""
    key = next(iter(before))
    missed = []
    for runtime, scores in after.items():
        drop = before[key] - scores[key]
        if not drop <= allowed + 1e-9:  # NaN counts as a drop, too
            change = f"from {before[key]:.4g} to {scores[key]:.4g}"
            missed.append(f"{runtime}: {key} drops by {drop:.4g} ({change}), more than {allowed:.4g}")
    return missed


def first_scores(before: Scores, simulated: Scores, deployed: Mapping[str, Scores]) -> Scores | None:
    """The first score of the float model, the simulation and the file in each runtime."""
    if not before:
        return None
    key = next(iter(before))
    files = {f"file in {runtime}": scores for runtime, scores in deployed.items()}
    return {where: scores[key] for where, scores in {"FP32": before, "simulation": simulated, **files}.items()}
