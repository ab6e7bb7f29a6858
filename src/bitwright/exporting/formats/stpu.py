"""STPU's minmax file: the range of every tensor, the step of every bias, and the exponent that sums start from.

``emin`` is a biased exponent of float32: 10 below that of what a convolution's sums reach, 20 below that of an
upsampled tensor, and 128 for products of matrices.
"""

import json
import math
from typing import Any

import numpy as np

from bitwright.errors import VerifyError
from bitwright.exporting.bundles.base import BundleFormat, Contents, Texts
from bitwright.exporting.bundles.ranges import Place, Range
from bitwright.exporting.formats.base import register_format

_SIDE = ".minmax.json"
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@register_format("stpu")
class STPU(BundleFormat):
    """``min`` and ``max`` by tensors, ``<operator>_weights`` for weights, ``<operator>_bias`` for biases."""

    name = "stpu"
    sides = (_SIDE,)
    schema = "stpu"
    limits = "symmetric int8 from -127 to 127; one scale per tensor"

    def why_not(self, found: Range) -> str | None:
        """The grid is symmetric."""
        good = found.symmetric and found.per_tensor and (found.qmin, found.qmax) == (-127, 127)
        return None if good else f"has integers from {found.qmin}; STPU has -127 to 127, one scale and no zero point"

    def texts(self, contents: Contents) -> Texts:
        """Everything that has a range, and what follows from it."""
        data: dict[str, dict[str, Any]] = {r.place.tensor: _ends(r) for r in contents.of("activation")}
        for r in contents.of("weight"):
            data[_weights(contents, r.place)] = _ends(r)
        for r in contents.of("bias"):
            reader = next(n for n in contents.model.graph.node if r.place.tensor in n.input)
            data[f"{reader.name}_bias"] = {"alpha": float(r.scale), "zero_point": 0}
        for node in contents.model.graph.node:
            if (exponent := _least_exponent(node, contents)) is not None and node.output[0] in data:
                data[node.output[0]]["emin"] = exponent
        return {_SIDE: json.dumps(data, indent=1) + "\n"}

    def ranges(self, texts: Texts, contents: Contents) -> list[Range]:
        """A range of magnitude m has the scale m / 127."""
        data, found = self.parsed(texts[_SIDE]), []
        known = {p.tensor: p for p in contents.places if p.kind == "activation"}
        known |= {_weights(contents, p): p for p in contents.places if p.kind == "weight"}
        for name, entry in data.items():
            if "alpha" in entry:
                continue
            if name not in known:
                raise VerifyError(f"the minmax file names {name!r}, which the model beside it does not quantize")
            if not math.isclose(entry["min"], -entry["max"], rel_tol=1e-6):
                raise VerifyError(f"the minmax file has a range of {name!r} that is not symmetric")
            scale = np.asarray(entry["max"] / 127, np.float32)
            found.append(Range(known[name], scale, np.zeros((), np.int64), -127, 127))
        return found


def _ends(found: Range) -> dict[str, Any]:
    largest = 127 * float(found.scale)
    return {"min": -largest, "max": largest}


def _weights(contents: Contents, place: Place) -> str:
    """The name of a weight: that of the operator that reads it, or of the tensor where several or none do."""
    readers = [n.name for n in contents.model.graph.node if place.tensor in n.input and n.op_type in _LAYERS]
    return f"{readers[0]}_weights" if len(readers) == 1 else place.tensor


def _least_exponent(node: Any, contents: Contents) -> int | None:  # noqa: ANN401
    found = [contents.ranges.get(name) for name in (*node.input[:2], node.output[0])]
    largest = [float(np.max(r.maximum)) if r is not None else 0.0 for r in found]
    if node.op_type in ("Gemm", "MatMul"):
        return 128
    if node.op_type in ("Resize", "Upsample") and largest[-1]:
        return _exponent(largest[-1]) - 20
    if node.op_type in ("Conv", "ConvTranspose") and node.input[1] in contents.constants:
        products = math.prod(contents.constants[node.input[1]].shape[1:])
        reached = max(math.sqrt(products) * largest[0] * largest[1], largest[-1])
        return _exponent(reached) - 10 if reached else None
    return None


def _exponent(value: float) -> int:
    """The biased exponent of a float32."""
    return math.frexp(value)[1] - 1 + 127
