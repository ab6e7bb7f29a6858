"""TensorRT's implicit quantization: a float model beside a calibration cache, and the same ranges as JSON.

The cache holds the scale of each computed tensor as the big-endian hex of a float32. TensorRT finds the scales of
weights itself: the largest magnitude of each output channel over 127.
"""

import json
import math
import re
import struct

import numpy as np

from bitwright.errors import ExportError, VerifyError
from bitwright.exporting.bundles.base import BundleFormat, Contents, Texts
from bitwright.exporting.bundles.derived import per_channel_maximum
from bitwright.exporting.bundles.ranges import Range
from bitwright.exporting.formats.base import register_format

_CACHE, _JSON = ".calibration.cache", ".ranges.json"
_HEADER = "TRT-8601-EntropyCalibration2"
_LINE = re.compile(r"(?P<tensor>.+): (?P<scale>[0-9a-f]{8})")


@register_format("tensorrt-ranges")
class TensorRTRanges(BundleFormat):
    """A float model, ``.calibration.cache`` for ``IInt8Calibrator``, and ``.ranges.json`` for ``dynamic_range``."""

    name = "tensorrt-ranges"
    sides = (_CACHE, _JSON)
    holds = ("activation",)
    schema = "tensorrt-ranges"
    limits = "symmetric int8; one scale per computed tensor; weights per output channel, whose largest integer is 127"

    def why_not(self, found: Range) -> str | None:
        place = found.place
        if place.bits != 8 or not found.symmetric:
            return f"has {place.bits} bits{'' if found.symmetric else ' and a zero point'}; TensorRT has symmetric int8"
        if place.kind == "activation" and not found.per_tensor:
            return "is computed and has scales of channels; computed tensors have one"
        if place.kind == "weight" and (found.per_tensor or place.block is not None):
            return "has no scale per output channel, which TensorRT finds itself; the format 'onnx' can store others"
        return None

    def texts(self, contents: Contents) -> Texts:
        derived = {r.place.tensor: r for r in per_channel_maximum(contents, 127)}
        for r in contents.of("weight"):
            if not np.allclose(derived[r.place.tensor].scale, r.scale, rtol=1e-5):
                raise ExportError(
                    f"TensorRT uses the largest magnitude over 127 as the scale of weights, and {r.place.tensor} has "
                    "others because it was learned or has fewer bits: export with 'onnx', which stores scales"
                )
        scales = {r.place.tensor: float(r.scale) for r in contents.of("activation")}
        lines = [_HEADER, *(f"{name}: {struct.pack('>f', scale).hex()}" for name, scale in scales.items())]
        ranges = {"tensorrt": {"blob_range": {name: scale * 127 for name, scale in scales.items()}}}
        return {_CACHE: "\n".join(lines) + "\n", _JSON: json.dumps(ranges, indent=1) + "\n"}

    def ranges(self, texts: Texts, contents: Contents) -> list[Range]:
        """Scales of the cache, which the JSON must fit, and those that TensorRT finds."""
        header, *lines = texts[_CACHE].splitlines() or [""]
        if not re.fullmatch(r"TRT-\d+-\w+", header):
            raise VerifyError(f"the calibration cache begins with {header[:40]!r}, not with TRT-<version>-<algorithm>")
        largest = self.parsed(texts[_JSON])["tensorrt"]["blob_range"]
        found = []
        for line in lines:
            match = _LINE.fullmatch(line)
            if match is None:
                raise VerifyError(f"the calibration cache has the line {line[:60]!r}; lines are 'tensor: hhhhhhhh'")
            place = contents.place(match["tensor"], "the calibration cache")
            (scale,) = struct.unpack(">f", bytes.fromhex(match["scale"]))
            if not math.isclose(largest.get(place.tensor, math.nan), scale * 127, rel_tol=1e-6):
                raise VerifyError(f"the cache and the JSON give {place.tensor!r} different ranges")
            found.append(Range(place, np.asarray(scale, np.float32), np.zeros((), np.int64), -128, 127))
        return [*found, *per_channel_maximum(contents, 127)]
