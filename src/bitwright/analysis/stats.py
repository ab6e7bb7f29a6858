"""The results of analyze: plain values for each operator and its tensors."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitwright.columns import in_columns
from bitwright.preparation import Verdict

BINS = 64
_FINE = 16 * BINS  # bins while counting, so that enough are left once they have widened
_CHUNK = 1 << 22  # values counted at a time, so that the copy made for counting stays small


@dataclass
class Histogram:
    """How often values occur: counts in equal bins from ``lo`` to ``hi``."""

    lo: float
    hi: float
    counts: list[int] = field(repr=False)

    @classmethod
    def over(cls, lo: float, hi: float) -> "Histogram":
        """An empty histogram with many bins, ready to count values from ``lo`` to ``hi`` and beyond."""
        if not hi - lo > max(abs(lo), abs(hi)) * 1e-6:
            room = max(abs(lo) * 1e-3, 1e-6)  # a constant still has bins around it
            lo, hi = lo - room, hi + room
        return cls(lo, hi, [0] * _FINE)

    def add(self, values: Tensor) -> None:
        """Count finite values; if some lie outside, bins join in pairs until all fit."""
        lowest, highest = (float(v) for v in torch.aminmax(values))
        spare = [0] * (len(self.counts) // 2)
        while lowest < self.lo:
            self.lo -= self.hi - self.lo
            self.counts = spare + _join(self.counts, 2)
        while highest > self.hi:
            self.hi += self.hi - self.lo
            self.counts = _join(self.counts, 2) + spare
        for part in values.flatten().split(_CHUNK):
            found = torch.histc(part.double(), len(self.counts), self.lo, self.hi).tolist()
            self.counts = [old + int(new) for old, new in zip(self.counts, found, strict=True)]

    def trimmed(self, keep: tuple[float, float] | None = None) -> "Histogram":
        """The histogram in at most ``BINS`` bins, without empty ends but including the range ``keep``."""
        width = (self.hi - self.lo) / len(self.counts)
        used = [i for i, count in enumerate(self.counts) if count]
        used += [min(max(int((edge - self.lo) / width), 0), len(self.counts) - 1) for edge in keep or ()]
        first, last = min(used, default=0), max(used, default=len(self.counts) - 1)
        many = -(-(last - first + 1) // BINS)
        counts = _join(self.counts[first : last + 1], many)
        return Histogram(self.lo + first * width, self.lo + (first + many * len(counts)) * width, counts)


def _join(counts: list[int], many: int) -> list[int]:
    return [sum(counts[i : i + many]) for i in range(0, len(counts), many)]


@dataclass
class TensorStats:
    """One tensor of an operator; anything that does not apply or was not measured is empty.

    Attributes:
        spec: how it is quantized; empty if it stays float.
        range: the lowest and highest value that can be represented, over all channels.
        sqnr: power of the float values over power of the error, in dB; infinite where there is no error.
        clipped: share of the float values beyond the representable range, from 0 to 1.
        histogram: the float values.
    """

    spec: str = ""
    range: tuple[float, float] | None = None
    sqnr: float | None = None
    clipped: float | None = None
    histogram: Histogram | None = None


@dataclass
class LayerStats:
    """One operator of the ledger, or one quantized input or constant of a graph (``operator`` says so).

    Attributes:
        name: as in the ledger.
        operator: conv2d, linear, add … or ``input`` or ``constant``.
        verdict: how it computes.
        reason: why, if the ledger says so.
        input: its spec; measured only if the layer is outside any graph and quantizes its own input.
        weight: the weight with its BatchNorm folded in, against the quantized weight.
        output: the result of the float model against the quantized model's, with all the error that came
            before. For an operator computed together with an activation it is the result of both, as on the
            target.
    """

    name: str
    operator: str
    verdict: Verdict
    reason: str = ""
    input: TensorStats = field(default_factory=TensorStats)
    weight: TensorStats = field(default_factory=TensorStats)
    output: TensorStats = field(default_factory=TensorStats)


class Analysis(list[LayerStats]):
    """The findings of :func:`bitwright.analyze`; ``print`` shows them as a table, with signal to noise in dB."""

    def __str__(self) -> str:
        header = ("name", "operator", "computes", "weight", "weight SQNR", "output", "output SQNR", "clipped", "reason")
        rows = [
            (
                each.name,
                each.operator,
                each.verdict.value,
                each.weight.spec,
                _decibels(each.weight.sqnr),
                each.output.spec,
                _decibels(each.output.sqnr),
                "" if each.output.clipped is None else f"{each.output.clipped:.2%}",
                each.reason,
            )
            for each in self
        ]
        return "\n".join(in_columns(header, rows, 3))

    __repr__ = __str__


def _decibels(sqnr: float | None) -> str:
    return "" if sqnr is None else f"{sqnr:.1f}"
