"""Nearest interpolation in ONNX: ``Resize`` by whole factors, or else torch's positions.

Runtimes find a position as floor(i / float(new / old)) where torch has floor(i · float(old / new)). They differ where
the result is a whole number, as for position 8 of 14 → 16 (6 and 7). So the file uses torch's positions, stored, or
computed torch's way if the old size is free. If the new size is computed from other sizes, ``Resize`` stays: decoders
double sizes this way, which is exact.
"""

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.function_libs.torch_lib.ops.nn import aten_upsample_nearestnd_vec

Translation = Callable[..., Any]
NEEDS_A_SIZE = "interpolation by this factor needs a fixed size: torch multiplies it in float64"
_FINE = 2**10  # parts of one that leave products with sizes exact in float32


def nearest_translations(op: Any) -> dict[Translation, Translation]:
    """A part of the table that ``torch.onnx.export`` takes."""
    aten = torch.ops.aten
    plain = (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d)
    exact = (aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d)
    return {each.vec: _nearest(op, each in exact) for each in (*plain, *exact)}


def is_exact(factor: float) -> bool:
    """Whether float32 holds the products of a factor with sizes."""
    return (factor * _FINE).is_integer()


def _nearest(op: Any, exact: bool) -> Translation:
    aten = torch.ops.aten
    function = (aten._upsample_nearest_exact1d if exact else aten.upsample_nearest1d).vec

    def nearest(x: Any, output_size: Sequence[Any] | None, scale_factors: Sequence[float] | None) -> Any:
        wishes, scaled = list(output_size or scale_factors or ()), output_size is None
        first = len(x.shape) - len(wishes)
        sizes = list(x.shape)[first:]
        if not all(isinstance(wish, int | float) for wish in wishes):
            if exact:
                raise ValueError("nearest-exact interpolation needs a fixed output size")
            return aten_upsample_nearestnd_vec(x, output_size, scale_factors)
        known = [_places(function, *each, scaled) for each in zip(sizes, wishes, strict=True)]
        if all(place is not None and _is_repetition(place) for place in known) or (scaled and all(map(_whole, wishes))):
            return aten_upsample_nearestnd_vec(x, output_size, scale_factors)
        for axis, (place, wish) in enumerate(zip(known, wishes, strict=True), first):
            chosen = _computed(x, axis, wish, scaled) if place is None else op.Constant(value_ints=place)
            if place is None or place != list(range(sizes[axis - first])):
                x = op.Gather(x, chosen, axis=axis)
        return x

    def _computed(x: Any, axis: int, wish: float, scaled: bool) -> Any:
        """Torch's positions along a free dimension, in the same steps of float32."""
        if scaled and not is_exact(wish):
            raise ValueError(NEEDS_A_SIZE)
        size = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
        old = op.Cast(size, to=ir.DataType.FLOAT)
        factor = op.Constant(value_float=1.0 / wish) if scaled else op.Div(old, op.Constant(value_float=float(wish)))
        new = op.Floor(op.Mul(old, op.Constant(value_float=wish))) if scaled else op.Constant(value_float=float(wish))
        zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
        steps = op.Range(zero, op.Cast(new, to=ir.DataType.INT64), one)
        place = op.Cast(steps, to=ir.DataType.FLOAT)
        place = op.Add(place, op.Constant(value_float=0.5)) if exact else place
        found = op.Cast(op.Floor(op.Mul(place, factor)), to=ir.DataType.INT64)
        return op.Min(found, op.Sub(size, one))

    return nearest


def _places(function: Translation, size: Any, wish: float, scaled: bool) -> list[int] | None:
    """Torch's positions along a dimension of a fixed size, for a new size or a factor."""
    if not isinstance(size, int):
        return None
    positions = torch.arange(size, dtype=torch.float64).reshape(1, 1, size)
    taken = function(positions, None, [wish]) if scaled else function(positions, [wish], None)
    return taken.flatten().long().tolist()


def _is_repetition(places: list[int]) -> bool:
    """Whether each position repeats equally often, in order."""
    times = places.count(0)
    return places == [i // times for i in range(len(places))]


def _whole(factor: float) -> bool:
    return float(factor).is_integer()
