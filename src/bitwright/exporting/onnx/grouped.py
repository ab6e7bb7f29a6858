"""Groups in ONNX: sorting rows by group, counting them, and multiplying those of each group with a matrix of its own.

A group's rows are sliced at bounds that the file computes, so each row is multiplied once, as in torch.
"""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

import bitwright.numerics.grouped  # noqa: F401  (defines the operator)

Translation = Callable[..., Any]
_FAR = 2**62


def grouped_translations(op: Any) -> dict[Translation, Translation]:
    """A part of the table that ``torch.onnx.export`` takes."""

    def whole(*values: int) -> Any:
        return op.Constant(value_ints=list(values))

    def product(x: Any, weight: Any, ends: Any) -> Any:
        count = weight.shape[0]
        bounds = op.Cast(ends, to=ir.DataType.INT64)
        inner = [op.Slice(bounds, whole(i), whole(i + 1), whole(0)) for i in range(count - 1)]
        parts = []
        for i, (first, last) in enumerate(zip([whole(0), *inner], [*inner, whole(_FAR)], strict=True)):
            matrix = op.Squeeze(op.Slice(weight, whole(i), whole(i + 1), whole(0)), whole(0))
            parts.append(op.MatMul(op.Slice(x, first, last, whole(0)), matrix))
        return op.Concat(*parts, axis=0)

    def histogram(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
        """Count values in bins of equal width; a value at the upper end is in the last."""
        if max <= min:
            raise ValueError("torch.histc needs its limits min and max in a file: without them they depend on the data")
        flat = op.Cast(op.Reshape(x, whole(-1)), to=ir.DataType.FLOAT)
        low, high, count = (op.Constant(value_float=float(v)) for v in (min, max, bins))
        place = op.Floor(op.Div(op.Mul(op.Sub(flat, low), count), op.Constant(value_float=float(max - min))))
        place = op.Where(op.Equal(flat, high), op.Constant(value_float=float(bins - 1)), place)
        each = op.Constant(value=ir.tensor(torch.arange(bins, dtype=torch.float32).numpy()))
        hits = op.Cast(op.Equal(op.Unsqueeze(place, whole(1)), each), to=ir.DataType.FLOAT)
        return op.CastLike(op.ReduceSum(hits, whole(0), keepdims=0), x)

    def sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        """TopK of all values, which keeps the order of equal ones."""
        axis = dim % len(x.shape)
        return op.TopK(x, op.Shape(x, start=axis, end=axis + 1), axis=axis, largest=int(descending), sorted=1)

    return {
        torch.ops.bitwright.grouped_product.default: product,
        torch.ops.aten.histc.default: histogram,
        torch.ops.aten.sort.stable: sort,
    }
