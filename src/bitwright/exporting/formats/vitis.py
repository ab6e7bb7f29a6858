"""Vitis AI's quant_info: bits and fix positions. A fix position f says that real = integer × 2**-f."""

import json
import math
from typing import Any

import numpy as np

from bitwright.exporting.bundles.base import BundleFormat, Contents, Texts
from bitwright.exporting.bundles.ranges import Range
from bitwright.exporting.formats.base import register_format

_SIDE = ".quant_info.json"


@register_format("vitis")
class Vitis(BundleFormat):
    """``param``, ``output`` and ``input``: lists of [bits, fix position] by the names of tensors."""

    name = "vitis"
    sides = (_SIDE,)
    schema = "vitis"
    limits = "symmetric and signed; one scale per tensor, which is a power of two"

    def why_not(self, found: Range) -> str | None:
        """A DPU shifts: it has no other scales than powers of two."""
        if not found.symmetric or not found.per_tensor:
            return "has a zero point, is unsigned or has several scales; Vitis has one, and signed integers"
        power = math.frexp(float(found.scale))[0] == 0.5
        return None if power else f"has the scale {float(found.scale):.6g}, which is not a power of two"

    def texts(self, contents: Contents) -> Texts:
        data: dict[str, dict[str, Any]] = {"param": {}, "output": {}, "input": {}}
        for r in contents.of("weight", "activation"):
            tensor = r.place.tensor
            group = "param" if r.place.kind == "weight" else "input" if tensor in contents.inputs else "output"
            data[group][tensor] = [[r.place.bits, 1 - math.frexp(float(r.scale))[1]]]
        return {_SIDE: json.dumps(data, indent=1) + "\n"}

    def ranges(self, texts: Texts, contents: Contents) -> list[Range]:
        """Powers of two, and all integers of the bits."""
        found = []
        for group in self.parsed(texts[_SIDE]).values():
            for name, ((bits, position),) in group.items():
                place = contents.place(name, "quant_info")
                ends = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
                scale = np.asarray(math.ldexp(1.0, -position), np.float32)
                found.append(Range(place, scale, np.zeros((), np.int64), *ends))
        return found
