"""Solve: choose one option per layer so that the total cost is least and limits are kept (with scipy's milp)."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bitwright.errors import ConfigError, require

_UNITS = {"size": " bytes", "latency": " s"}
Table = Sequence[Sequence[float]]
"""For each layer, a number for each of its options."""


Pair = tuple[int, int, Table]
"""Two layers by their numbers, and what each option of the first adds with each option of the second."""


def choose(
    costs: Table, limits: Sequence[tuple[str, Table, float]], pairs: Sequence[Pair] = (), paired: str = ""
) -> list[int]:
    """Choose the option of each layer that minimizes the sum of ``costs`` while keeping each limited sum.

    ``pairs`` are what options of two layers add jointly to the limited sum named ``paired``, or else to the costs.
    """
    optimize = require("scipy.optimize", "search", "choosing bits under a budget")
    sizes = list(map(len, costs))
    together = np.concatenate([np.zeros(0), *(np.ravel(np.asarray(table, float)) for _, _, table in pairs)])
    none = np.zeros_like(together)
    constraints = [optimize.LinearConstraint(rows, low, low) for rows, low in _structure(sizes, pairs)]
    for name, table, limit in limits:
        least = sum(map(min, table))
        if least > limit and name != paired:
            unit = _UNITS.get(name, "")
            raise ConfigError(
                f"no choice of bits keeps {name} at {limit:.6g}{unit}: the least possible is {least:.6g}{unit}"
            )
        numbers, scale = _scaled(table, together if name == paired else none)
        constraints.append(optimize.LinearConstraint(numbers[None, :], -np.inf, limit / scale))
    flat, _ = _scaled(costs, none if paired else together)
    solved = optimize.milp(
        flat,
        constraints=constraints,
        integrality=np.ones(len(flat)),
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        raise ConfigError(f"no choice of bits keeps the budget: {solved.message}")
    chosen = np.round(solved.x).astype(bool)
    starts = np.cumsum([0, *sizes])
    return [int(np.flatnonzero(chosen[a:b])[0]) for a, b in pairwise(starts)]


def _scaled(table: Table, together: np.ndarray) -> tuple[np.ndarray, float]:
    """Scale the numbers of all variables, and return the divisor: bytes and damages differ by many powers of ten."""
    numbers = np.concatenate([*(np.asarray(row, float) for row in table), together])
    scale = max(float(np.abs(numbers).max()), 1e-300)
    return numbers / scale, scale


def _structure(sizes: Sequence[int], pairs: Sequence[Pair]) -> list[tuple[np.ndarray, float]]:
    """Constraints: one option for each layer, and for each pair the variable of exactly the two chosen options."""
    owner, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum([0, *sizes])
    one_each = (owner[None, :] == np.arange(len(sizes))[:, None]).astype(float)
    total = len(owner) + sum(sizes[i] * sizes[j] for i, j, _ in pairs)
    rows = [(np.pad(one_each, ((0, 0), (0, total - len(owner)))), 1.0)]
    begin = len(owner)
    for i, j, _ in pairs:
        shape = sizes[i], sizes[j]
        numbers = begin + np.arange(shape[0] * shape[1]).reshape(shape)
        for layer, table in ((i, numbers), (j, numbers.T)):
            linked = np.zeros((len(table), total))
            for option, mine in enumerate(table):
                linked[option, mine], linked[option, starts[layer] + option] = 1.0, -1.0
            rows.append((linked, 0.0))
        begin += numbers.size
    return rows
