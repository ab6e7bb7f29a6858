"""Canonical views: every tensor becomes (values,) or (outer, channel, inner), so one kernel serves all."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Canonical(NamedTuple):
    """A tensor in canonical form, with everything needed to go back.

    ``values`` is (N,) with scales of shape () for a whole tensor, else (outer, channel, inner) with scales of
    shape (channel, 1). The view follows the memory order of the tensor, so channels-last needs no copy. Only
    groups along another axis than the last in memory do: then ``grouped`` is the tensor, to copy its layout.
    """

    values: Tensor
    shape: tuple[int, ...]
    order: tuple[int, ...]
    axis: int | None
    group: int | None
    grouped: Tensor | None = None

    def params(self, param: Tensor) -> Tensor:
        """Shape a parameter with one value per scale to broadcast against ``values``."""
        if self.axis is None:
            return param.reshape(())
        if self.group is not None:  # groups are listed in the order of the permuted tensor
            param = param.permute(self.order)
        return param.reshape(-1).unsqueeze(1)  # always with the same strides, so that kernels need not recompile

    def like(self, tensor: Tensor, x: Tensor) -> Tensor:
        """The values of another ``tensor`` shaped like ``x``, in the order of the values of ``x``."""
        if tensor.stride() != x.stride():
            tensor = torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)
        return canonical(tensor, self.axis, self.group).values

    def restore(self, result: Tensor) -> Tensor:
        """Give a result in canonical form the tensor's own shape and memory order."""
        restored = result.reshape(self.shape)
        if self.order != tuple(range(len(self.order))):
            restored = restored.permute(_inverse(self.order))
        if self.grouped is None:
            return restored
        return torch.empty_like(self.grouped, dtype=result.dtype).copy_(restored)

    def gradient(self, total: Tensor, param: Tensor) -> Tensor:
        """Give the gradient of a parameter, one value per scale, that parameter's shape and dtype."""
        total = total.to(param.dtype)
        if self.group is None:
            return total.reshape(param.shape)
        return total.reshape([param.shape[d] for d in self.order]).permute(_inverse(self.order)).contiguous()


def canonical(x: Tensor, axis: int | None, group: int | None) -> Canonical:
    """View ``x`` in canonical form for one scale (no axis), or one per channel or group along ``axis``."""
    if axis is None:
        moved, order = _in_memory_order(x)
        return Canonical(moved.reshape(-1), tuple(moved.shape), order, None, None)
    axis %= x.ndim
    if group is None:
        moved, order = _in_memory_order(x)
        sizes, place = tuple(moved.shape), order.index(axis)
        values = moved.reshape(math.prod(sizes[:place]), sizes[place], math.prod(sizes[place + 1 :]))
        return Canonical(values, sizes, order, axis, None)
    # Groups run along the last axis of the permuted tensor: (…, n) -> (1, … * n / group, group).
    order = (*(d for d in range(x.ndim) if d != axis), axis)
    moved = x.permute(order).contiguous()
    in_order = axis == x.ndim - 1 and x.is_contiguous()
    return Canonical(moved.reshape(1, -1, group), tuple(moved.shape), order, axis, group, None if in_order else x)


def broadcast(param: Tensor, x: Tensor, axis: int | None, group: int | None) -> Tensor:
    """Expand a scale or zero point against ``x`` the plain way; the slow, obvious twin of ``canonical``."""
    if axis is None:
        return param
    axis %= x.ndim
    if group is not None:
        return torch.repeat_interleave(param, group, dim=axis)
    return param.reshape([-1 if d == axis else 1 for d in range(x.ndim)])


def _in_memory_order(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Permute the tensor so that it is contiguous, and return how; copy it if it is a slice or expanded."""
    if x.is_contiguous():
        return x, tuple(range(x.ndim))
    order = tuple(sorted(range(x.ndim), key=lambda d: (-x.stride(d), d)))
    moved = x.permute(order)
    # If no permutation makes it contiguous, the copy has the memory order that torch gives to results.
    return (moved, order) if moved.is_contiguous() else _in_memory_order(x.clone())


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
