"""Differences: where two results of a model differ, and by how much; debug mode asks this around each schedule."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def runner(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """A function that runs a copy of ``model``, as it is then, always on the same inputs and random numbers."""

    def run() -> Any:
        now = copy.deepcopy(model)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return now(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs)))

    return run


def difference(before: Any, after: Any, tolerance: float = 0.0, where: str = "the output") -> str:
    """Say where two results differ, or return nothing; ``tolerance`` is a part of the largest value before."""
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return _of_tensors(before, after, tolerance, where)
    if type(before) is not type(after):
        return f"{where} was a {type(before).__name__} and is a {type(after).__name__}"
    items, others = _items(before), _items(after)
    if items is None or others is None:
        same = before == after or before != before  # NaN
        return "" if same else f"{where} was {before!r} and is {after!r}"
    if list(items) != list(others):
        return f"{where} had the parts {list(items)} and has {list(others)}"
    return next(filter(None, (difference(items[k], others[k], tolerance, f"{where}[{k!r}]") for k in items)), "")


def _items(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def _of_tensors(before: torch.Tensor, after: torch.Tensor, tolerance: float, where: str) -> str:
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"{where} was {_describe(before)} and is {_describe(after)}"
    if torch.equal(before, after):
        return ""
    wide_before, wide_after = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (before, after))
    same = (wide_before == wide_after) | (wide_before.isnan() & wide_after.isnan())
    gap = (wide_before - wide_after).abs().masked_fill(same, 0.0)
    finite = wide_before.abs().masked_fill(~wide_before.isfinite(), 0.0)
    largest, furthest = float(finite.max()), float(gap.max())
    if furthest <= tolerance * largest:  # false too for NaN, where only one side has it
        return ""
    return f"{where} differs by {furthest:.3g}, its largest value being {largest:.3g} (allowed: {tolerance:g} of it)"


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
