"""Pools, over one to three dimensions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.nn.operators.base import Operator, Source, argument, register_operator


def _returns_values_only(node: fx.Node, module: nn.Module | None) -> bool:
    return not argument(node, module, 6, "return_indices", False)


def _to_one_value(node: fx.Node, module: nn.Module | None) -> bool:
    size: Any = argument(node, module, 1, "output_size")
    return all(s == 1 for s in (size if isinstance(size, tuple | list) else (size,)))


def _functions(name: str) -> tuple[Callable[..., Any], ...]:
    """The functions that torch has under a name, in ``F`` and at its root; often they are the same."""
    return tuple(dict.fromkeys(getattr(home, name) for home in (F, torch) if hasattr(home, name)))


def _define(rank: int, kind: str, module: str, *more: Source, **traits: Any) -> None:
    name = f"{kind}_pool{rank}d"
    sources = (getattr(nn, f"{module}Pool{rank}d"), *_functions(name), *more)
    register_operator(Operator(name, sources, rank=rank, pool=True, homogeneous=True, **traits))


for _rank in (1, 2, 3):
    _define(_rank, "max", "Max", getattr(F, f"max_pool{_rank}d_with_indices"), carries=_returns_values_only)
    _define(_rank, "avg", "Avg")
    _define(_rank, "adaptive_avg", "AdaptiveAvg", averages_planes=_to_one_value)
    _define(_rank, "adaptive_max", "AdaptiveMax", carries=True)
