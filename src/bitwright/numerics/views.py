"""Canonical views: every tensor becomes (values,) or (outer, channel, inner), so one kernel serves all."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Canonical:
    """A tensor in canonical form, with what it takes to go back.

    ``values`` is (N,) with scales of shape () for a whole tensor, else (outer, channel, inner) with scales of
    shape (channel, 1). The view follows the memory order of the tensor, so channels-last needs no copy. Only
    groups along another axis than the last in memory do: then ``grouped`` is the tensor, to copy its layout.
    """

    values: Tensor
    param_shape: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    grouped: Tensor | None = None

    def params(self, param: Tensor) -> Tensor:
        """Reshape a scale or zero point to broadcast against ``values``."""
        return param.reshape(self.param_shape)

    def restore(self, result: Tensor) -> Tensor:
        """Give a result in canonical form the tensor's own shape and memory order."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        restored = result.reshape(self.shape).permute(inverse)
        if self.grouped is None:
            return restored
        return torch.empty_like(self.grouped, dtype=result.dtype).copy_(restored)


def canonical(x: Tensor, axis: int | None, group: int | None) -> Canonical:
    """View ``x`` in canonical form for one scale (no axis), or one per channel or group along ``axis``."""
    if group is not None and axis is not None:
        axis %= x.ndim
        # Groups run along the last axis of the permuted tensor: (…, n) -> (1, … * n / group, group).
        order = (*(d for d in range(x.ndim) if d != axis), axis)
        moved = x.permute(order).contiguous()
        in_order = axis == x.ndim - 1 and x.is_contiguous()
        values = moved.reshape(1, -1, group)
        return Canonical(values, (-1, 1), tuple(moved.shape), order, grouped=None if in_order else x)
    order = _memory_order(x)
    moved = x.permute(order)
    if not moved.is_contiguous():  # a slice, or expanded: a copy lies in the order that torch gives to results
        x = x.clone()
        order = _memory_order(x)
        moved = x.permute(order)
    if axis is None:
        return Canonical(moved.reshape(-1), (), tuple(moved.shape), order)
    place = order.index(axis % x.ndim)
    sizes = tuple(moved.shape)
    outer = _product(sizes[:place])
    return Canonical(moved.reshape(outer, sizes[place], _product(sizes[place + 1 :])), (-1, 1), sizes, order)


def _memory_order(x: Tensor) -> tuple[int, ...]:
    if x.is_contiguous():
        return tuple(range(x.ndim))
    return tuple(sorted(range(x.ndim), key=lambda d: (-x.stride(d), d)))


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def group_params(param: Tensor, axis: int, ndim: int) -> Tensor:
    """Flatten a group scale of shape (…, n / group, …) in the order in which ``canonical`` lists groups."""
    axis %= ndim
    return param.permute(*(d for d in range(ndim) if d != axis), axis).reshape(-1)


def broadcast(param: Tensor, x: Tensor, axis: int | None, group: int | None) -> Tensor:
    """Expand a scale or zero point against ``x`` the plain way; the slow, obvious twin of ``canonical``."""
    if axis is None:
        return param
    axis %= x.ndim
    if group is not None:
        return torch.repeat_interleave(param, group, dim=axis)
    return param.reshape([-1 if d == axis else 1 for d in range(x.ndim)])
