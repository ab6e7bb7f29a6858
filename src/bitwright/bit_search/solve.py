"""Solve: choose one option for each layer such that the total cost is least and limits are kept (scipy's milp)."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bitwright.errors import ConfigError, require

Table = Sequence[Sequence[float]]
"""For each layer, a number for each of its options."""


def choose(costs: Table, limits: Sequence[tuple[str, Table, float]]) -> list[int]:
    """The option of each layer with the least sum of ``costs``, where each limited sum is at most its limit.

    Args:
        costs: what is to be least.
        limits: the name, the numbers and the limit of each sum.
    """
    optimize = require("scipy.optimize", "search", "choosing bits under a budget")
    sizes = [len(row) for row in costs]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    one_each = (owner[None, :] == np.arange(len(sizes))[:, None]).astype(float)
    constraints = [optimize.LinearConstraint(one_each, 1.0, 1.0)]
    for name, table, limit in limits:
        least = sum(min(row) for row in table)
        if least > limit:
            raise ConfigError(f"no choice of bits keeps {name} at {limit:.6g}: the least possible is {least:.6g}")
        numbers = np.concatenate([np.asarray(row, float) for row in table])
        scale = max(float(np.abs(numbers).max()), 1e-300)  # sums of bytes and of damages differ by many powers of ten
        constraints.append(optimize.LinearConstraint(numbers[None, :] / scale, -np.inf, limit / scale))
    flat = np.concatenate([np.asarray(row, float) for row in costs])
    scale = max(float(np.abs(flat).max()), 1e-300)
    ones = np.ones(len(flat))
    solved = optimize.milp(
        flat / scale,
        constraints=constraints,
        integrality=ones,
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        raise ConfigError(f"no choice of bits keeps the budget: {solved.message}")
    chosen = np.round(solved.x).astype(bool)
    starts = np.cumsum([0, *sizes])
    return [int(np.flatnonzero(chosen[a:b])[0]) for a, b in pairwise(starts)]
