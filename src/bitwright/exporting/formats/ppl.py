"""OpenPPL's quantization parameters: one JSON object with every tensor, weights too, and the type of each operator."""

import json
from typing import Any

import numpy as np

from bitwright.errors import VerifyError
from bitwright.exporting.bundles.base import BundleFormat, Contents, Texts
from bitwright.exporting.bundles.ranges import Range
from bitwright.exporting.formats.base import register_format

_SIDE = ".ppl.json"


@register_format("ppl")
class PPL(BundleFormat):
    """``quant_info`` by tensors and ``op_info`` by operators, as ppl.nn reads them.

    Scales are written as floating-point numbers even where they are whole: ppl.nn keeps whole ones as integers.
    """

    name = "ppl"
    sides = (_SIDE,)
    schema = "ppl"
    limits = "any bits; one scale per tensor, or per output channel of a weight"

    def why_not(self, found: Range) -> str | None:
        """Groups, and channels of computed tensors."""
        if found.place.block is not None:
            return "has scales of groups"
        several = found.place.kind == "activation" and not found.per_tensor
        return "is computed and has scales of channels; computed tensors have one" if several else None

    def texts(self, contents: Contents) -> Texts:
        ranges = contents.of("activation", "weight")
        weights = {r.place.tensor for r in ranges if r.place.kind == "weight" and r.place.bits == 8}
        wide = {r.place.tensor for r in ranges if r.place.bits != 8}
        operators = {
            node.name: {"data_type": "INT8"}
            for node in contents.model.graph.node
            if weights.intersection(node.input) and not wide.intersection(node.input)
        }
        data = {"quant_info": {r.place.tensor: _entry(r) for r in ranges}, "op_info": operators}
        return {_SIDE: json.dumps(data, indent=1) + "\n"}

    def ranges(self, texts: Texts, contents: Contents) -> list[Range]:
        found = []
        for name, entry in self.parsed(texts[_SIDE])["quant_info"].items():
            place = contents.place(name, "quant_info")
            scale, point = np.asarray(entry["scale"], np.float32), np.asarray(entry["zero_point"], np.int64)
            made = Range(place, scale, point, entry["q_min"], entry["q_max"])
            ends = {"tensor_min": made.minimum, "tensor_max": made.maximum}
            if wrong := [key for key, value in ends.items() if not np.allclose(entry[key], value, rtol=1e-5)]:
                raise VerifyError(
                    f"{name!r} contradicts itself: {wrong[0]} does not follow from its scale and zero point"
                )
            found.append(made)
        return found


def _entry(found: Range) -> dict[str, Any]:
    return {
        "bit_width": found.place.bits,
        "per_channel": not found.per_tensor,
        "sym": found.symmetric,
        "scale": found.scale.astype(np.float64).tolist(),
        "zero_point": found.zero_point.tolist(),
        "q_min": found.qmin,
        "q_max": found.qmax,
        "tensor_min": found.minimum.tolist(),
        "tensor_max": found.maximum.tolist(),
    }
