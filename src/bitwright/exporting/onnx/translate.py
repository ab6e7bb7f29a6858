"""How Bitwright's operators are written in ONNX: standard QuantizeLinear and DequantizeLinear, nothing private."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from torch import nn

import bitwright.numerics.fp8
import bitwright.numerics.pooling
import bitwright.numerics.qdq  # noqa: F401  (the three define the operators)
from bitwright.exporting.modules import DeployedQuantizer, IntegerTensor

SITE = "bitwright.site"  # in the metadata of a node, while the file is made
PLAIN, RICH = 18, 21  # opset 21 adds integers of 4 and 16 bits, fp8 without a zero point, and groups

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
_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)


def storage_type(qmin: int, qmax: int) -> tuple[ir.DataType, bool]:
    """The smallest ONNX type that holds [qmin, qmax], and whether it holds exactly that."""
    for (low, high), kind in _TYPES.items():
        if low <= qmin and qmax <= high and (low < 0) == (qmin < 0):
            return kind, (low, high) == (qmin, qmax)
    raise ValueError(f"no ONNX type holds the integers from {qmin} to {qmax}")


def lowest_opset(twin: nn.Module) -> int:
    """The lowest opset that can say what a deployed model does.

    In opset 21 onnxruntime 1.31 breaks int8 files: it repeats quantizers around pools and reshapes with their
    ``output_dtype`` and then turns int8 into uint8, but not there.
    """
    return RICH if any(_needs_rich(module) for module in twin.modules()) else PLAIN


def _needs_rich(module: nn.Module) -> bool:
    if isinstance(module, IntegerTensor):
        return module.group is not None or module.integers.dtype not in (torch.int8, torch.uint8, torch.int32)
    if not isinstance(module, DeployedQuantizer) or not module.active:
        return False
    spec = module.spec
    return module.group is not None or spec.format.floating or storage_type(spec.qmin, spec.qmax)[0] not in _BYTES


def translations(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table that ``torch.onnx.export`` takes, for one version of ONNX."""
    op: Any = getattr(onnxscript, f"opset{opset}")  # typed for constants, but here it takes values of the graph

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
        """Dequantize a stored constant; weights name their zero point (0), which onnxruntime's integer Gemm needs."""
        places = _places(axis, group)
        if q.dtype == ir.DataType.INT32 or q.dtype in _FP8_TYPES.values():
            return op.DequantizeLinear(q, scale, **places)
        return op.DequantizeLinear(q, scale, op.Cast(zero_point, to=q.dtype), **places)

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

    def mark(x: Any, site: int) -> Any:  # noqa: ANN401
        """Note on the DequantizeLinear before it which site it is; the file has no operator for that."""
        x.producer().metadata_props[SITE] = str(site)
        return x

    return {
        torch.ops.bitwright.quantize_dequantize.default: quantize_dequantize,
        torch.ops.bitwright.dequantize.default: dequantize,
        torch.ops.bitwright.fp8_quantize_dequantize.default: fp8_quantize_dequantize,
        torch.ops.bitwright.global_average_pool.default: global_average_pool,
        torch.ops.bitwright.mark.default: mark,
    }


def _places(axis: int | None, group: int | None) -> dict[str, int]:
    places = {} if axis is None else {"axis": axis}
    return places if group is None else {**places, "block_size": group}
