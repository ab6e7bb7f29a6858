"""How Bitwright's operators are written in ONNX: standard QuantizeLinear and DequantizeLinear, nothing private."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset21

import bitwright.numerics.fp8
import bitwright.numerics.pooling
import bitwright.numerics.qdq  # noqa: F401  (the three define the operators)

op: Any = opset21  # its operators are typed for constants, here they take values of the graph

# Every integer type ONNX can quantize to: (lowest, highest) -> type.
_TYPES = {
    (0, 15): ir.DataType.UINT4,
    (-8, 7): ir.DataType.INT4,
    (0, 255): ir.DataType.UINT8,
    (-128, 127): ir.DataType.INT8,
    (0, 65535): ir.DataType.UINT16,
    (-32768, 32767): ir.DataType.INT16,
}
_FP8_TYPES = {"e4m3": ir.DataType.FLOAT8E4M3FN, "e5m2": ir.DataType.FLOAT8E5M2}


def storage_type(qmin: int, qmax: int) -> tuple[ir.DataType, bool]:
    """The smallest ONNX type that holds [qmin, qmax], and whether it holds exactly that."""
    for (low, high), kind in _TYPES.items():
        if low <= qmin and qmax <= high and (low < 0) == (qmin < 0):
            return kind, (low, high) == (qmin, qmax)
    raise ValueError(f"no ONNX type holds the integers from {qmin} to {qmax}")


def quantize_dequantize(
    x: Any,  # noqa: ANN401
    scale: Any,  # noqa: ANN401
    zero_point: Any,  # noqa: ANN401
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int | None = None,
) -> Any:  # noqa: ANN401
    """Quantize and dequantize; a range narrower than the type's is clipped first."""
    kind, exact = storage_type(qmin, qmax)
    point = op.Cast(zero_point, to=kind)
    if not exact:
        as_float = op.Cast(zero_point, to=ir.DataType.FLOAT)
        low = op.Mul(op.Sub(op.Constant(value_float=float(qmin)), as_float), scale)
        high = op.Mul(op.Sub(op.Constant(value_float=float(qmax)), as_float), scale)
        x = op.Clip(x, low, high) if axis is None else op.Min(op.Max(x, low), high)
    places = _places(axis, group)
    return op.DequantizeLinear(op.QuantizeLinear(x, scale, point, **places), scale, point, **places)


def dequantize(q: Any, scale: Any, zero_point: Any, axis: int | None = None, group: int | None = None) -> Any:  # noqa: ANN401
    """Dequantize a stored constant. Weights name their zero point (0), which onnxruntime needs for its integer Gemm."""
    if q.dtype == ir.DataType.INT32 or q.dtype in _FP8_TYPES.values():
        return op.DequantizeLinear(q, scale, **_places(axis, group))
    return op.DequantizeLinear(q, scale, op.Cast(zero_point, to=q.dtype), **_places(axis, group))


def fp8_quantize_dequantize(
    x: Any,  # noqa: ANN401
    scale: Any,  # noqa: ANN401
    form: str,
    axis: int | None = None,
    group: int | None = None,
) -> Any:  # noqa: ANN401
    """Round to fp8 and back; what is beyond the range saturates."""
    places = _places(axis, group)
    q = op.QuantizeLinear(x, scale, output_dtype=_FP8_TYPES[form], saturate=1, **places)
    return op.DequantizeLinear(q, scale, **places)


def global_average_pool(x: Any) -> Any:  # noqa: ANN401
    """Average over all spatial dimensions."""
    return op.GlobalAveragePool(x)


def _places(axis: int | None, group: int | None) -> dict[str, int]:
    places = {} if axis is None else {"axis": axis}
    return places if group is None else {**places, "block_size": group}


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table that ``torch.onnx.export`` takes."""
    return {
        torch.ops.bitwright.quantize_dequantize.default: quantize_dequantize,
        torch.ops.bitwright.dequantize.default: dequantize,
        torch.ops.bitwright.fp8_quantize_dequantize.default: fp8_quantize_dequantize,
        torch.ops.bitwright.global_average_pool.default: global_average_pool,
    }
