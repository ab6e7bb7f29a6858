"""Tables of values: where each level of a method begins, for unevenly spaced levels."""

from typing import Any

import torch
from torch import Tensor

from bitwright.errors import ExportError
from bitwright.quantizer import TensorQuantizer

_MOST = 256  # levels
_LARGEST = 0x7F7FFFFF  # the bits of the largest finite float32


def table(quantizer: TensorQuantizer) -> tuple[Tensor, Tensor]:
    """The bounds of a quantizer and its levels, for each channel if it has scales of channels.

    A bound is the lowest float32 that has a given level, or a higher one. It is found by searching bit patterns with
    the method's own kernel, so that a comparison tells what the kernel would have rounded to.
    """
    with torch.no_grad():
        count = len(_levels(quantizer))
        scale = quantizer.qparams()[0]
        channels = 1 if quantizer.method.axis is None else scale.numel()
        numbers = torch.arange(count, device=scale.device).expand(channels, count)
        levels = _rows(quantizer, numbers, quantizer.values)
        wanted = numbers[:, 1:]
        low, high = (torch.full_like(wanted, end) for end in (-_LARGEST, _LARGEST))
        while bool((low < high).any()):
            middle = (low + high).div(2, rounding_mode="floor")
            reached = _rows(quantizer, _number(middle), quantizer.integers) >= wanted
            low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    bounds, levels = _number(high).contiguous(), levels.contiguous()
    return (bounds, levels) if quantizer.method.axis is not None else (bounds[0], levels[0])


def _levels(quantizer: TensorQuantizer) -> Tensor:
    """The levels of a method, if files can hold them."""
    found: Any = quantizer.method.levels()
    if isinstance(found, Tensor) and found.ndim == 1 and 1 < len(found) <= _MOST and bool((found.diff() > 0).all()):
        return found
    name = type(quantizer.method).__name__
    raise ExportError(f"{name}.levels must return a tensor of 2 to {_MOST} rising numbers, not {found!r}")


def _number(order: Tensor) -> Tensor:
    """The float32 that is this many steps above (or below) zero among all float32 numbers."""
    magnitude = order.abs().to(torch.int32).view(torch.float32)
    return torch.where(order < 0, -magnitude, magnitude)


def _rows(quantizer: TensorQuantizer, rows: Tensor, function: Any) -> Tensor:
    """Apply a function of a quantizer to (channels, n) values, laid out as its axis says."""
    axis = quantizer.method.axis
    if axis is None:
        return function(rows)
    rank = max(axis + 1, -axis, 2)
    other = 0 if axis % rank else 1
    laid_out = rows.reshape(*rows.shape, *[1] * (rank - 2)).movedim((0, 1), (axis, other))
    return function(laid_out).movedim((axis, other), (0, 1)).reshape(rows.shape)
