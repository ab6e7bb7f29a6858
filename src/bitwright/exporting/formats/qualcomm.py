"""Qualcomm's encodings beside a float model, as AIMET writes them for SNPE, QNN and QAIRT, in three versions.

0.6.1 and 1.0.0 count integers from 0, and an offset that is never positive: real = (integer + offset) × scale. 2.0.0
has ONNX's zero point. Their integers have the whole range of their bits.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bitwright.errors import VerifyError
from bitwright.exporting.bundles.base import BundleFormat, Contents, Texts
from bitwright.exporting.bundles.ranges import Place, Range
from bitwright.exporting.formats.base import register_format

_SIDE = ".encodings"
_CLOSE = 1e-5  # as a share of the range, for bounds that must fit scale and offset


class _Qualcomm(BundleFormat):
    sides = (_SIDE,)
    holds = ("activation", "weight", "bias")

    def texts(self, contents: Contents) -> Texts:
        return {_SIDE: json.dumps(self.encodings(contents), indent=1) + "\n"}

    def encodings(self, contents: Contents) -> dict[str, Any]:
        """The whole file as plain data."""
        parts = {"activation_encodings": ("activation",), "param_encodings": ("weight", "bias")}
        listed = {key: self.listed([r for k in kinds for r in contents.of(k)]) for key, kinds in parts.items()}  # pyrefly: ignore
        return {"version": self.name.rpartition("-")[2], **listed}

    def listed(self, ranges: list[Range]) -> Any:
        """The encodings of one group."""
        raise NotImplementedError

    def ranges(self, texts: Texts, contents: Contents) -> list[Range]:
        return list(self._read(self.parsed(texts[_SIDE]), contents))

    def _read(self, data: Any, contents: Contents) -> Iterator[Range]:
        for group in ("activation_encodings", "param_encodings"):
            given = data[group]
            for name, entry in given.items() if isinstance(given, dict) else ((e["name"], e) for e in given):
                place = contents.place(name, "the file of encodings")
                yield self.read_one(place, entry)

    def read_one(self, place: Place, entry: object) -> Range:
        """The range that one encoding gives."""
        raise NotImplementedError


@register_format("qualcomm-0.6.1")
class Qualcomm061(_Qualcomm):
    """A dict of tensors, each with a list of encodings: one, or one per output channel."""

    name = "qualcomm-0.6.1"
    schema = "qualcomm-0.6.1"
    limits = "4 to 32 bits; one scale per tensor, or per output channel of a weight"

    def why_not(self, found: Range) -> str | None:
        if found.place.block is not None:
            return "has scales of groups, which came with version 1.0.0"
        if found.place.bits < 4:
            return f"has {found.place.bits} bits, and the least are 4"
        return _no_channels_of_activations(found)

    def encodings(self, contents: Contents) -> dict[str, Any]:
        """All groups, and for people what was asked for."""
        computed, stored = contents.of("activation"), contents.of("weight")
        args = {
            "activation_bitwidth": max((r.place.bits for r in computed), default=8),
            "param_bitwidth": max((r.place.bits for r in stored), default=8),
            "dtype": "int",
            "is_symmetric": all(r.symmetric for r in stored),
            "per_channel_quantization": any(not r.per_tensor for r in stored),
        }
        return {**super().encodings(contents), "quantizer_args": args}

    def listed(self, ranges: list[Range]) -> dict[str, list[dict[str, Any]]]:
        return {r.place.tensor: [self._entry(r, s, o) for s, o in _numbers(r)] for r in ranges}

    def _entry(self, found: Range, scale: float, offset: int) -> dict[str, Any]:
        return {
            "bitwidth": found.place.bits,
            "dtype": "int",
            "is_symmetric": str(found.symmetric),
            "min": offset * scale,
            "max": (offset + 2**found.place.bits - 1) * scale,
            "scale": scale,
            "offset": offset,
        }

    def read_one(self, place: Place, entry: Any) -> Range:
        for e in entry:
            ends = e["offset"] * e["scale"], (e["offset"] + 2 ** e["bitwidth"] - 1) * e["scale"]
            span = ends[1] - ends[0]
            if abs(ends[0] - e["min"]) > _CLOSE * span or abs(ends[1] - e["max"]) > _CLOSE * span:
                raise VerifyError(f"the encoding of {place.tensor!r} contradicts itself: bounds and scale do not fit")
        _same(place, "bitwidth", {e["bitwidth"] for e in entry})
        return _range(place, [e["scale"] for e in entry], [e["offset"] for e in entry])


@register_format("qualcomm-1.0.0")
class Qualcomm100(_Qualcomm):
    """A list of encodings, each with a name, a kind and flat lists of scales and offsets."""

    name = "qualcomm-1.0.0"
    schema = "qualcomm-1.0.0"
    limits = "2 to 32 bits; one scale per tensor, per output channel, or per group of inputs of a weight"

    def why_not(self, found: Range) -> str | None:
        return _no_channels_of_activations(found)

    def encodings(self, contents: Contents) -> dict[str, Any]:
        return {**super().encodings(contents), "excluded_layers": []}

    def listed(self, ranges: list[Range]) -> list[dict[str, Any]]:
        return [self._entry(r) for r in ranges]

    def _entry(self, found: Range) -> dict[str, Any]:
        place, numbers = found.place, _numbers(found)
        kind = "PER_TENSOR" if found.per_tensor else "PER_CHANNEL" if place.block is None else "PER_BLOCK"
        entry = {
            "name": place.tensor,
            "enc_type": kind,
            "dtype": "INT",
            "bw": place.bits,
            "is_sym": found.symmetric,
            "scale": [s for s, _ in numbers],
            "offset": [o for _, o in numbers],
        }
        return entry if place.block is None else {**entry, "block_size": place.block}

    def read_one(self, place: Place, entry: Any) -> Range:
        _same(place, "bw", {entry["bw"]})
        return _range(place, entry["scale"], entry["offset"], entry.get("block_size"))


@register_format("qualcomm-2.0.0")
class Qualcomm200(_Qualcomm):
    """One list for all tensors, with scales and zero points as ONNX has them."""

    name = "qualcomm-2.0.0"
    schema = "qualcomm-2.0.0"
    limits = "2 to 32 bits; one scale per tensor, per channel of any axis, or per group"

    def encodings(self, contents: Contents) -> dict[str, Any]:
        return {"version": "2.0.0", "encodings": [self._entry(r) for r in contents.of("activation", "weight", "bias")]}

    def _entry(self, found: Range) -> dict[str, Any]:
        place = found.place
        entry: dict[str, Any] = {
            "name": place.tensor,
            "output_dtype": f"{'int' if place.signed else 'uint'}{place.bits}",
            "y_scale": found.scale.astype(np.float64).tolist(),
        }
        if found.zero_point.any():
            entry["y_zero_point"] = found.zero_point.tolist()
        if place.axis is not None:
            entry["axis"] = place.axis
        return entry if place.block is None else {**entry, "block_size": place.block}

    def _read(self, data: Any, contents: Contents) -> Iterator[Range]:
        for entry in data["encodings"]:
            place = contents.place(entry["name"], "the file of encodings")
            wanted = {"output_dtype": f"{'int' if place.signed else 'uint'}{place.bits}", "axis": place.axis}
            wanted["block_size"] = place.block
            for key, value in wanted.items():
                _same(place, key, {entry.get(key)}, value)
            scale = np.asarray(entry["y_scale"], np.float32)
            point = np.asarray(entry.get("y_zero_point", np.zeros(scale.shape)), np.int64)
            yield Range(place, scale, point, place.lowest, place.highest)


def _no_channels_of_activations(found: Range) -> str | None:
    several = found.place.kind == "activation" and not found.per_tensor
    return "is computed and has scales of channels; computed tensors have one" if several else None


def _numbers(found: Range) -> list[tuple[float, int]]:
    """Scales and offsets, flat."""
    offsets = found.place.lowest - np.ravel(found.zero_point)
    return [(float(s), int(o)) for s, o in zip(np.ravel(found.scale), offsets, strict=True)]


def _range(place: Place, scales: list[float], offsets: list[int], block: int | None = None) -> Range:
    _same(place, "block_size", {block}, place.block)
    if {len(scales), len(offsets)} != {math.prod(place.shape)}:
        given = f"{len(scales)} scales and {len(offsets)} offsets"
        raise VerifyError(f"the encoding of {place.tensor!r} has {given}, not {math.prod(place.shape)} of each")
    scale = np.asarray(scales, np.float32).reshape(place.shape)
    point = place.lowest - np.asarray(offsets, np.int64).reshape(place.shape)
    return Range(place, scale, point, place.lowest, place.highest)


def _same(place: Place, key: str, given: set[Any], wanted: object = None) -> None:
    wanted = place.bits if wanted is None and key in ("bitwidth", "bw") else wanted
    if given != {wanted}:
        shown = ", ".join(map(repr, given))
        raise VerifyError(f"the encoding of {place.tensor!r} has the {key} {shown}, and its model {wanted!r}")
