"""NNIE's parameter file: the largest magnitude of what each layer reads, beside a float model.

NNIE's tools find the largest magnitude of weights themselves. Operators of some types, and convolutions in groups, have
no entry. What only these read is calibrated by NNIE: the file has it apart, for the proof, and a constraint tells it.
"""

import json
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.errors import ExportError, VerifyError
from bitwright.exporting.bundles.base import BundleFormat, Contents, Texts
from bitwright.exporting.bundles.ranges import Range
from bitwright.exporting.formats.base import register_format
from bitwright.exporting.record import ExportRecord
from bitwright.quantizer import TensorQuantizer

if TYPE_CHECKING:
    import onnx

    from bitwright.exporting.bundles.split import Split

_SIDE = ".gfpq_param_dict.json"
_WITHOUT = ("Flatten", "Relu", "PRelu", "Sigmoid", "Reshape", "Softmax", "Clip", "GlobalAveragePool", "Mul")
_UPSAMPLES = ("Resize", "Upsample")
_MOVING = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Identity")


@register_format("nnie")
class NNIE(BundleFormat):
    """``gfpq_param_dict``: for each layer, the largest magnitude of each of its quantized inputs."""

    name = "nnie"
    sides = (_SIDE,)
    holds = ("activation",)
    schema = "nnie"
    limits = (
        "the logarithmic levels of NNIE; one largest level per tensor, which for weights is their largest magnitude"
    )

    def split(self, proto: "onnx.ModelProto", record: ExportRecord) -> "Split":
        from bitwright.exporting.bundles.tables import split_tables

        return split_tables(proto, record, _quantizer(1.0).method.levels().numpy())

    def join(self, proto: "onnx.ModelProto", ranges: list[Range]) -> "onnx.ModelProto":
        from bitwright.exporting.bundles.tables import join_tables

        return join_tables(proto, ranges, _quantizer)

    def texts(self, contents: Contents) -> Texts:
        for r in _weights(contents):
            if r.scale != contents.ranges[r.place.tensor].scale:
                raise ExportError(
                    f"NNIE uses the largest magnitude of weights as their largest level, and {r.place.tensor} has "
                    "another: export with the format 'onnx', which stores levels"
                )
        largest = {r.place.tensor: float(r.scale) for r in contents.of("activation")}
        read = _read(contents.model, largest)
        said = {name for names in read.values() for name in names}
        entries = {node: [largest[name] for name in names] for node, names in read.items()}
        others = {name: value for name, value in largest.items() if name not in said}
        data = {"nnie": {"gfpq_param_dict": entries}, "bitwright": {"calibrated_by_nnie": others}}
        return {_SIDE: json.dumps(data, indent=1) + "\n"}

    def ranges(self, texts: Texts, contents: Contents) -> list[Range]:
        """What the entries of all that read a tensor say of it, and what NNIE finds itself."""
        data = self.parsed(texts[_SIDE])
        entries, known = data["nnie"]["gfpq_param_dict"], {p.tensor for p in contents.places if p.kind == "activation"}
        read = _read(contents.model, known)
        if entries.keys() != read.keys():
            node = next(iter(entries.keys() ^ read.keys()))
            raise VerifyError(f"the parameter file and the model beside it do not both have a quantized layer {node!r}")
        largest: dict[str, float] = dict(data["bitwright"]["calibrated_by_nnie"])
        for node, names in read.items():
            if len(names) != len(entries[node]):
                raise VerifyError(f"the parameter file has {len(entries[node])} values of {node!r}, not {len(names)}")
            for name, value in zip(names, entries[node], strict=True):
                if largest.setdefault(name, value) != value:
                    raise VerifyError(f"the parameter file has two ranges of {name!r}, which {node!r} reads")
        places = [(contents.place(name, "the parameter file"), value) for name, value in largest.items()]
        found = [Range(p, np.asarray(v, np.float32), np.zeros((), np.int64), -1, 1) for p, v in places]
        return [*found, *_weights(contents)]


def has_entry(node: Any) -> bool:
    """Whether the parameter file has an entry for an operator that reads quantized tensors."""
    grouped = node.op_type == "Conv" and any(a.name == "group" and a.i > 1 for a in node.attribute)
    return node.op_type not in _WITHOUT and not grouped


def sources(nodes: Iterable[Any], tensors: Iterable[str]) -> dict[str, str]:
    """The quantized tensors, and those that hold their values moved, with the name of the quantized one."""
    found = {name: name for name in tensors}
    for node in nodes:
        settings = {a.name: a.s for a in node.attribute}
        moves = node.op_type in _MOVING or (
            node.op_type in _UPSAMPLES and settings.get("mode", b"nearest") == b"nearest"
        )
        if moves and node.input[0] in found:
            found |= {name: found[node.input[0]] for name in node.output if name not in found}
    return found


def _read(model: "onnx.ModelProto", tensors: Iterable[str]) -> dict[str, list[str]]:
    """The quantized tensors that each entry is of: an upsampling has a second one, for the permutation in it."""
    known, read, upsamples = sources(model.graph.node, tensors), {}, 0
    for node in model.graph.node:
        names = [known[name] for name in node.input if name in known]
        if names and has_entry(node):
            read[node.name] = names
            if node.op_type in _UPSAMPLES:
                read[f"{node.name}_permute_{upsamples}"] = names
                upsamples += 1
    return read


def _weights(contents: Contents) -> list[Range]:
    """The ranges that NNIE finds in weights."""
    found = []
    for place in (p for p in contents.places if p.kind == "weight"):
        magnitude = float(np.abs(contents.constants[place.tensor]).max())
        quantizer = _quantizer(magnitude)
        largest = quantizer.method.unit(*quantizer._known()).numpy()
        found.append(Range(place, largest.astype(np.float32), np.zeros((), np.int64), -1, 1))
    return found


@cache
def _quantizer(magnitude: float) -> TensorQuantizer:
    """NNIE's quantizer of a tensor with this largest magnitude."""
    quantizer = TensorQuantizer("int8 symmetric tensor", method="NNIEFakeQuantize")
    quantizer.set_range(-magnitude, magnitude)
    return quantizer
