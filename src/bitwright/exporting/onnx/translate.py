"""Write the parts of a deployed model in ONNX: QuantizeLinear and DequantizeLinear, nothing private."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright.numerics.pooling  # noqa: F401  (defines the operator)
from bitwright.exporting.onnx.operators import operator_translations
from bitwright.exporting.onnx.recurrent import recurrent_translations
from bitwright.exporting.parts import DeployedQuantizer, IntegerTensor, Part, TableQuantizer, TableTensor, parts_of
from bitwright.spec import QuantSpec

PART = "bitwright.part"  # in a node's metadata during export: the number of the part that it ends
KEPT = "bitwright.kept"  # in the same place: the node is not computed beforehand

# The integer types that tensors are quantized to: (lowest, highest) -> type. onnxruntime 1.31 refuses convolutions of
# tensors of four bits, which ONNX has, too: they are clipped, and stored in bytes.
_TYPES = {
    (0, 255): ir.DataType.UINT8,
    (-128, 127): ir.DataType.INT8,
    (0, 65535): ir.DataType.UINT16,
    (-32768, 32767): ir.DataType.INT16,
}
_FP8_TYPES = {"e4m3": ir.DataType.FLOAT8E4M3FN, "e5m2": ir.DataType.FLOAT8E5M2}
_FLOATS = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16, torch.float64: ir.DataType.DOUBLE}
_LOWEST = torch.tensor(torch.finfo(torch.float32).min)


def storage_type(qmin: int, qmax: int) -> tuple[ir.DataType, bool]:
    """The smallest ONNX type that holds [qmin, qmax], and whether it holds exactly that."""
    for (low, high), kind in _TYPES.items():
        if low <= qmin and qmax <= high and (low < 0) == (qmin < 0):
            return kind, (low, high) == (qmin, qmax)
    raise ValueError(f"no ONNX type holds the integers from {qmin} to {qmax}")


def packed_type(part: Part) -> ir.DataType | None:
    """The 4-bit type that holds a stored constant; None if none does."""
    site = part.site if isinstance(part, IntegerTensor) and part.packs else None
    bits = QuantSpec.parse(site.spec).bits if site is not None and not _floating(part) else 8
    return None if site is None or bits > 4 else ir.DataType.INT4 if site.signed else ir.DataType.UINT4


def _floating(part: Any) -> bool:
    return part.integers.is_floating_point()


def translations(opset: int, twin: nn.Module, *, pack: bool = False) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table that ``torch.onnx.export`` takes, for one version of ONNX and one model, whose parts it numbers.

    With ``pack``, weights of at most 4 bits are stored in 4 bits.
    """
    op: Any = getattr(onnxscript, f"opset{opset}")  # typed for constants, but here it takes values of the graph
    writers = [_Writer(op, name, part, packed_type(part) if pack else None) for name, part in parts_of(twin)]
    for number, writer in enumerate(writers):
        writer.part.number = number

    def part(x: Any, number: int) -> Any:
        single = x if x.dtype in (None, ir.DataType.FLOAT) else op.Cast(x, to=ir.DataType.FLOAT)
        value = writers[number].computed(single)
        return value if single is x else op.Cast(value, to=x.dtype)

    def stored(number: int, shape: Any, dtype: Any) -> Any:
        value, kind = writers[number].stored(), writers[number].kind
        return value if kind == ir.DataType.FLOAT else op.Cast(value, to=kind)

    def global_average_pool(x: Any) -> Any:
        return op.GlobalAveragePool(x)

    return {
        **operator_translations(op),
        **recurrent_translations(op),
        torch.ops.bitwright.part.default: part,
        torch.ops.bitwright.stored.default: stored,
        torch.ops.bitwright.global_average_pool.default: global_average_pool,
    }


class _Writer:
    """Writes one part; ``packed`` is the type to store a constant in, if not that of its integers."""

    def __init__(self, op: Any, name: str, part: Part, packed: ir.DataType | None = None) -> None:
        self.op, self.name, self.part, self.packed = op, name, part, packed
        self.made: dict[str, Any] = {}

    @property
    def kind(self) -> ir.DataType:
        """The type of a stored constant's values; it is always quantized in float32."""
        return _FLOATS.get(getattr(self.part, "dtype", torch.float32), ir.DataType.FLOAT)

    def computed(self, x: Any) -> Any:
        """Write a part that changes a tensor."""
        part = self.part
        if isinstance(part, TableQuantizer):
            return self._table_quantizer(x, part)
        if not isinstance(part, DeployedQuantizer):
            return self.op.Max(x, self._constant("lowest", _LOWEST))
        return self._float_quantizer(x, part) if part.spec.format.floating else self._quantizer(x, part)

    def _quantizer(self, x: Any, part: DeployedQuantizer) -> Any:
        """Quantize and dequantize; a range narrower than the type's is clipped first."""
        spec = part.spec
        kind, exact = storage_type(spec.qmin, spec.qmax)
        if part.limits is not None:
            x = self.op.Clip(x, *(self._constant(k, end) for k, end in zip(("low", "high"), part.limits, strict=True)))
        elif not exact:
            ends = ((q - part.zero_point.float()) * part.scale for q in (spec.qmin, spec.qmax))
            low, high = (_along(end, part, len(x.shape)) for end in ends)
            limits = self._constant("low", low), self._constant("high", high)
            x = self.op.Clip(x, *limits) if part.axis is None else self.op.Min(self.op.Max(x, limits[0]), limits[1])
        scale, point = self._constant("scale", part.scale), self._constant("zero_point", part.zero_point, kind)
        places = _places(part)
        q = self.op.QuantizeLinear(x, scale, point, **places)
        return self._noted(self.op.DequantizeLinear(q, scale, point, **places))

    def _float_quantizer(self, x: Any, part: DeployedQuantizer) -> Any:
        """Round to fp8 and back, saturating.

        A guard comes first: onnxruntime turns fp8 into integer operators, and then refuses them.
        """
        x = self.op.Max(x, self._constant("lowest", _LOWEST))
        scale, places = self._constant("scale", part.scale), _places(part)
        kind = _FP8_TYPES[part.spec.format.name]
        q = self.op.QuantizeLinear(x, scale, output_dtype=kind, saturate=1, **places)
        return self._noted(self.op.DequantizeLinear(q, scale, **places))

    def _table_quantizer(self, x: Any, part: TableQuantizer) -> Any:
        """Find the position of each value among the bounds by bisection, and look up its level."""
        steps = (part.levels.shape[-1] - 1).bit_length()
        size = 1 << steps
        missing = (1, size - part.levels.shape[-1])  # the first level has no bound; NaN is not a bound of anything
        bounds = self._constant("bounds", F.pad(part.bounds, missing, value=torch.nan).reshape(-1))
        levels = self._constant("levels", F.pad(part.levels, (0, missing[1])).reshape(-1))
        table = None  # where that of a channel begins
        if part.axis is not None:
            begins = torch.arange(len(part.levels), dtype=torch.int32) * size
            table = self._constant("tables", _along(begins, part, len(x.shape)))
        place = self._constant("first", torch.zeros((), dtype=torch.int32))
        for step in reversed(range(steps)):
            higher = self.op.Add(place, self._constant(f"step_{step}", torch.tensor(1 << step, dtype=torch.int32)))
            bound = self.op.Gather(bounds, higher if table is None else self.op.Add(higher, table))
            place = self.op.Where(self.op.GreaterOrEqual(x, bound), higher, place)
        self._noted(place)
        return self.op.Gather(levels, place if table is None else self.op.Add(place, table))

    def _stored_table(self, part: TableTensor) -> Any:
        """Look up the levels of a stored constant."""
        places = self._noted(self.op.Cast(self._constant("places", part.places), to=ir.DataType.INT32))
        levels = self.op.Gather(self._constant("levels", part.levels), places)
        _kept(places, levels)
        scale = self._constant("scale", _along(part.scale, part, part.places.ndim))
        return _kept(self.op.Mul(levels, scale))

    def stored(self) -> Any:
        """Dequantize a stored constant; weights name their zero point (0), which onnxruntime's integer Gemm needs."""
        part: Any = self.part
        if isinstance(part, TableTensor):
            return self._stored_table(part)
        q, scale = self._constant("integers", part.integers, self.packed), self._constant("scale", part.scale)
        if q.dtype == ir.DataType.INT32 or q.dtype in _FP8_TYPES.values():
            return self._noted(self.op.DequantizeLinear(q, scale, **_places(part)))
        point = self._constant("zero_point", part.zero_point, q.dtype)
        return self._noted(self.op.DequantizeLinear(q, scale, point, **_places(part)))

    def _noted(self, value: Any) -> Any:
        """Note that the node of a value reads the integers of the part, or returns them (Where)."""
        value.producer().metadata_props[PART] = str(self.part.number)
        return value

    def _constant(self, key: str, tensor: Tensor, kind: ir.DataType | None = None) -> Any:
        """A constant with a descriptive name, stored once however often the part is called."""
        if key in self.made:
            return self.made[key]
        array = ir.tensor((tensor.float() if tensor.dtype == torch.double else tensor).detach().cpu().contiguous())
        if kind is not None:
            array = ir.tensor(array.numpy().astype(kind.numpy()), dtype=kind)
        value = self.op.Constant(value=array)
        value.name, value.dtype = f"{self.name}.{key}", array.dtype
        return self.made.setdefault(key, value)


def _kept(*values: Any) -> Any:
    """Keep the nodes of values from being constant-folded, so that what is stored stays small."""
    for value in values:
        value.producer().metadata_props[KEPT] = ""
    return values[-1]


def _along(limit: Tensor, part: Any, rank: int) -> Tensor:
    """A limit for each channel or group, in a shape that broadcasts against a tensor of that rank."""
    if part.axis is None:
        return limit
    if part.group is not None:
        return limit.repeat_interleave(part.group, part.axis)
    return limit.reshape(-1, *[1] * (rank - 1 - part.axis % rank))


def _places(part: Any) -> dict[str, int]:
    places = {} if part.axis is None else {"axis": part.axis}
    return places if part.group is None else {**places, "block_size": part.group}
