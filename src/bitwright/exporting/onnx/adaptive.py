"""Adaptive pools in ONNX, which has none: plain pools where the windows are alike, or else slices along each dimension.

    first value of window i = floor(i · size / windows)            end of it = ceil((i + 1) · size / windows)

A window covers the same range of one dimension for all positions of the others, so dimensions can be reduced in turn.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Translation = Callable[..., Any]


def adaptive_translations(op: Any) -> dict[Translation, Translation]:
    """A part of the table that ``torch.onnx.export`` takes."""
    aten = torch.ops.aten
    table: dict[Translation, Translation] = {}
    for averages, largest in (
        (aten.adaptive_avg_pool1d, aten.adaptive_max_pool1d),
        (aten.adaptive_avg_pool2d, aten.adaptive_max_pool2d),
        (aten.adaptive_avg_pool3d, aten.adaptive_max_pool3d),
    ):
        table[averages.default] = _pool(op, op.AveragePool, op.ReduceMean)
        table[largest.default] = _largest(op)
    return table


def _largest(op: Any) -> Translation:
    """Return a string as the second result, the positions of the maxima: a model that reads it cannot be written."""
    pool = _pool(op, lambda x, **settings: op.MaxPool(x, **settings)[0], op.ReduceMax)
    return lambda x, output_size: (pool(x, output_size), op.Constant(value_string="not written"))


def _pool(op: Any, alike: Translation, reduce: Translation) -> Translation:
    def pool(x: Any, output_size: Sequence[int | None]) -> Any:
        rank = len(output_size)
        sizes = list(x.shape)[-rank:]
        windows = [size if count is None else count for size, count in zip(sizes, output_size, strict=True)]
        if len(x.shape) == rank + 2 and all(map(_are_alike, sizes, windows)):
            kernel = [size // count for size, count in zip(sizes, windows, strict=True)]
            return alike(x, kernel_shape=kernel, strides=kernel)
        for axis, size, count in zip(range(-rank, 0), sizes, windows, strict=True):
            x = _along(x, axis, size, count)
        return x

    def _along(x: Any, axis: int, size: Any, count: Any) -> Any:
        where = op.Constant(value_ints=[axis])
        if count == size:
            return x
        if count == 1:
            return reduce(x, where, keepdims=1)
        if not isinstance(size, int):
            raise ValueError("an adaptive pool needs a fixed size: its windows depend on it")
        ranges = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        parts = [op.Slice(x, *(op.Constant(value_ints=[at]) for at in (*ends, axis))) for ends in ranges]
        return op.Concat(*(reduce(part, where, keepdims=1) for part in parts), axis=axis)

    return pool


def _are_alike(size: Any, count: Any) -> bool:
    return isinstance(size, int) and isinstance(count, int) and size % count == 0
