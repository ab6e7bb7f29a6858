"""Differences: where two results of a model differ, and by how much, for capture and debug mode."""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.graph.capture.failures import call_model
from bitwright.graph.capture.nesting import tensors_in
from bitwright.modes import random_numbers_kept

_Sequence = tuple | list | deque


def runner(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that runs a copy of the current ``model``, always on the same inputs and random numbers."""

    def run() -> Any:
        now = copy.deepcopy(model)
        with torch.no_grad(), random_numbers_kept():
            torch.manual_seed(0)
            return now(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs)))

    return run


def difference(before: object, after: object, tolerance: float = 0.0, where: str = "the output") -> str:
    """Say where two results of any nesting differ, or return nothing; NaN equals NaN.

    All sequences are alike, and so are all mappings. ``tolerance`` is a share of the largest earlier value.
    """
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return _of_tensors(before, after, tolerance, where)
    alike = any(isinstance(before, kind) and isinstance(after, kind) for kind in (Mapping, _Sequence))
    if not alike and type(before) is not type(after):
        return f"{where} was {_describe(before)} and is {_describe(after)}"
    items, others = _items(before), _items(after)
    if items is None or others is None:
        return "" if call_model(_equal, before, after) else f"{where} was {before!r} and is {after!r}"
    if list(items) != list(others):
        return f"{where} had the parts {list(items)} and has {list(others)}"
    return next(filter(None, (difference(items[k], others[k], tolerance, f"{where}[{k!r}]") for k in items)), "")


def _items(value: object) -> dict[Any, Any] | None:
    """The parts of a container or an object, or None if it has none or compares as a whole."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, _Sequence):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    by_parts = type(value).__eq__ is object.__eq__ or next(tensors_in(value), None) is not None
    return vars(value) if by_parts and hasattr(value, "__dict__") else None


def _equal(a: object, b: object) -> bool:
    return bool(a == b or (a != a and b != b))  # NaN


def _of_tensors(before: Tensor, after: Tensor, tolerance: float, where: str) -> str:
    if (before.shape, before.dtype, before.layout) != (after.shape, after.dtype, after.layout):
        return f"{where} was {_describe(before)} and is {_describe(after)}"
    if before.layout is not torch.strided:
        before, after = before.to_dense(), after.to_dense()
    if torch.equal(before, after):
        return ""
    same = (before == after) | (before.isnan() & after.isnan())
    wide_before, wide_after = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (before, after))
    gap = (wide_before - wide_after).abs().masked_fill(same, 0.0)
    finite = wide_before.abs().masked_fill(~wide_before.isfinite(), 0.0)
    largest, furthest = float(finite.max()), float(gap.max())
    if bool(same.all()) or (tolerance and furthest <= tolerance * largest):  # also false for NaN on one side only
        return ""
    return f"{where} differs by {furthest:.3g}, its largest value being {largest:.3g} (allowed: {tolerance:g} of it)"


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    layout = "" if value.layout is torch.strided else f" {value.layout}".replace("torch.", "")
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{layout}"
