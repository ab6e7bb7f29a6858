"""Tengine's scale file: one line for each computed tensor. Tengine finds the scales of weights itself."""

import re

import numpy as np

from bitwright.errors import ExportError, VerifyError
from bitwright.exporting.bundles.base import BundleFormat, Contents, Texts
from bitwright.exporting.bundles.derived import whole_tensor_limits
from bitwright.exporting.bundles.ranges import Range
from bitwright.exporting.formats.base import register_format

_SIDE = ".scale"
_LINE = re.compile(r"(?P<tensor>[^ ]+) (?P<scale>[0-9.e+-]+) (?P<point>\d+)")


@register_format("tengine")
class Tengine(BundleFormat):
    """Lines ``tensor scale zero_point``; a weight's range is from its least to its largest value, and holds zero."""

    name = "tengine"
    sides = (_SIDE,)
    holds = ("activation",)
    limits = "uint8; one scale per tensor; weights that use all integers from 0 to 255"

    def why_not(self, found: Range) -> str | None:
        place = found.place
        if place.type != "uint8" or place.bits != 8 or not found.per_tensor:
            return f"has {place.bits} bits of {place.type}; Tengine has uint8, with one scale"
        return "has a space in its name" if " " in place.tensor else None

    def texts(self, contents: Contents) -> Texts:
        derived = {r.place.tensor: r for r in whole_tensor_limits(contents)}
        for r in contents.of("weight"):
            other = derived[r.place.tensor]
            if not np.isclose(other.scale, r.scale, rtol=1e-5) or other.zero_point != r.zero_point:
                raise ExportError(
                    f"Tengine finds the range of weights itself, from the least to the largest value, and "
                    f"{r.place.tensor} has another, because it was learned or clipped: export with the format 'onnx'"
                )
        lines = [f"{r.place.tensor} {float(r.scale)!r} {int(r.zero_point)}" for r in contents.of("activation")]
        return {_SIDE: "\n".join(lines) + "\n"}

    def ranges(self, texts: Texts, contents: Contents) -> list[Range]:
        """Scales of the lines, and those that Tengine finds."""
        found = []
        for line in texts[_SIDE].splitlines():
            match = _LINE.fullmatch(line)
            if match is None:
                raise VerifyError(f"the scale file has the line {line[:60]!r}; lines are 'tensor scale zero_point'")
            place = contents.place(match["tensor"], "the scale file")
            try:
                scale = np.asarray(float(match["scale"]), np.float32)
            except ValueError as error:
                raise VerifyError(f"the scale file has {match['scale']!r} for the scale of {place.tensor!r}") from error
            found.append(Range(place, scale, np.asarray(int(match["point"]), np.int64), 0, 255))
        return [*found, *whole_tensor_limits(contents)]
