"""STPU's minmax file: the range of every tensor, the step of every bias, and the exponent that sums start from.

``emin`` is a biased exponent of float32: 10 below that of what a convolution's sums reach, 20 below that of an
upsampled tensor, and 128 for products of matrices. What a ReLU reads has the range of what it makes.
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
        good = found.symmetric and found.per_tensor and (found.qmin, found.qmax) == (-127, 127)
        return None if good else f"has integers from {found.qmin}; STPU has -127 to 127, one scale and no zero point"

    def texts(self, contents: Contents) -> Texts:
        """Everything that has a range, and what follows from it."""
        data: dict[str, dict[str, Any]] = {r.place.tensor: _ends(r) for r in contents.of("activation")}
        for r in contents.of("weight"):
            data[_weights(contents, r.place)] = _ends(r)
        for r in contents.of("bias"):
            data[_bias(contents, r.place)] = {"alpha": float(r.scale), "zero_point": 0}
        data |= {name: dict(data[result]) for name, result in _rectified(contents).items()}
        for node in contents.model.graph.node:
            if (exponent := _least_exponent(node, contents)) is not None and node.output[0] in data:
                data[node.output[0]]["emin"] = exponent
        return {_SIDE: json.dumps(data, indent=1) + "\n"}

    def ranges(self, texts: Texts, contents: Contents) -> list[Range]:
        """A range of magnitude m has the scale m / 127."""
        data, found, known = self.parsed(texts[_SIDE]), [], _known(contents)
        rectified = _rectified(contents)
        _check_rectified(data, rectified)
        for name, entry in data.items():
            if "alpha" in entry or name in rectified:
                continue
            if name not in known:
                raise VerifyError(f"the minmax file names {name!r}, which the model beside it does not quantize")
            if not math.isclose(entry["min"], -entry["max"], rel_tol=1e-6):
                raise VerifyError(f"the minmax file has a range of {name!r} that is not symmetric")
            scale = np.asarray(entry["max"] / 127, np.float32)
            found.append(Range(known[name], scale, np.zeros((), np.int64), -127, 127))
        _check_derived(data, Contents(contents.model, contents.places, {r.place.tensor: r for r in found}))
        return found


def _ends(found: Range) -> dict[str, Any]:
    largest = 127 * float(found.scale)
    return {"min": -largest, "max": largest}


def _rectified(contents: Contents) -> dict[str, str]:
    """The tensors that only a ReLU reads, with what it makes of them, where that has a range."""
    nodes, known = contents.model.graph.node, {p.tensor for p in contents.places}
    found = {n.input[0]: n.output[0] for n in nodes if n.op_type == "Relu" and n.output[0] in known}
    return {name: result for name, result in found.items() if name not in known}


def _check_rectified(data: dict[str, dict[str, Any]], rectified: dict[str, str]) -> None:
    for name, result in rectified.items():
        if any(data.get(name, {}).get(end) != data.get(result, {}).get(end) for end in ("min", "max")):
            raise VerifyError(f"the minmax file gives {name!r} and {result!r} different ranges")


def _known(contents: Contents) -> dict[str, Place]:
    """The places by how the file names them."""
    kinds = {"activation": lambda p: p.tensor, "weight": lambda p: _weights(contents, p)}
    return {kinds[p.kind](p): p for p in contents.places if p.kind in kinds}


def _weights(contents: Contents, place: Place) -> str:
    """The name of a weight: that of the operator that reads it, or of the tensor where several or none do."""
    readers = [n.name for n in contents.model.graph.node if place.tensor in n.input and n.op_type in _LAYERS]
    return f"{readers[0]}_weights" if len(readers) == 1 else place.tensor


def _bias(contents: Contents, place: Place) -> str:
    """The name of a bias: that of the operator that adds it."""
    return next(f"{n.name}_bias" for n in contents.model.graph.node if place.tensor in n.input)


def _check_derived(data: dict[str, dict[str, Any]], contents: Contents) -> None:
    """Refuse a file whose steps of biases or exponents are not those that its ranges give."""
    for place in (p for p in contents.places if p.kind == "bias"):
        entry, step = data.get(_bias(contents, place)), _step(contents, place)
        if entry is None:
            raise VerifyError(f"the minmax file has no step for the bias {place.tensor!r}")
        if step is not None and not math.isclose(entry["alpha"], step, rel_tol=1e-5):
            raise VerifyError(f"the minmax file has the alpha {entry['alpha']:.6g} of {place.tensor!r}, not {step:.6g}")
    for node in contents.model.graph.node:
        entry, wanted = data.get(node.output[0]), _least_exponent(node, contents)
        if entry is not None and entry.get("emin") != wanted:
            raise VerifyError(f"the minmax file has the emin {entry.get('emin')} of {node.output[0]!r}, not {wanted}")


def _step(contents: Contents, place: Place) -> float | None:
    """The step of a bias: that of its layer's input times that of the weight; None if one of them is float."""
    nodes = contents.model.graph.node
    reader = next(n for n in nodes if place.tensor in n.input)
    if reader.op_type not in _LAYERS:
        reader = next(n for n in nodes if n.output[0] in reader.input)
    factors = [contents.ranges.get(name) for name in reader.input[:2]]
    return math.prod(float(r.scale) for r in factors if r is not None) if all(factors) else None


def _least_exponent(node: Any, contents: Contents) -> int | None:
    made = _rectified(contents).get(node.output[0], node.output[0])
    found = [contents.ranges.get(name) for name in (*node.input[:2], made)]
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
