"""The cards at the top of the report: what was proven, in a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bitwright.reporting.text import NOT_MEASURED, change, count, megabytes, number, percent, smaller

if TYPE_CHECKING:  # the package of proofs needs onnx, but a report does not
    from bitwright.verification.proof import Proof, RuntimeProof

_NOTABLE_LOSS = 0.01  # accuracy lost that is shown in red


@dataclass
class Line:
    """One number on a card: its label, its value, a note, a bar from 0 to 1, and a style."""

    label: str
    value: str
    note: str = ""
    share: float | None = None
    style: str = ""


@dataclass
class Card:
    """A title and its numbers."""

    title: str
    lines: list[Line] = field(default_factory=list)


def cards(proof: Proof | None, accuracy: Mapping[str, float] | None) -> list[Card]:
    """The cards for everything known."""
    made = [_accuracy(accuracy)] if accuracy else []
    if proof is None:
        return made
    made.append(_size(proof))
    made.append(Card("Crashes", [Line(p.runtime, p.crash, style="bad") for p in proof.runtimes.values() if p.crash]))
    whole = [p for p in proof.runtimes.values() if not p.crash]
    by_runtime: dict[str, Callable[[RuntimeProof], Line | None]] = {
        "Operators in integers": _coverage,
        "Speed against FP32": _speed,
        "Peak memory against FP32": _memory,
        "Values equal to the simulation": _equal,
        "Largest gap to the simulation": _gap,
    }
    made += [Card(title, list(filter(None, map(line, whole)))) for title, line in by_runtime.items()]
    return [card for card in made if card.lines]


def _accuracy(accuracy: Mapping[str, float]) -> Card:
    shares = all(0.0 <= value <= 1.0 for value in accuracy.values())
    card = Card("Accuracy" if shares else "Score")
    first: float | None = None
    for label, value in accuracy.items():
        text = percent(value, digits=2) if shares else number(value)
        line = Line(label, text, share=value if shares else None)
        if first is None:
            first, line.style = value, "base"
        else:
            line.note = change(first, value, percent=shares)
            line.style = "bad" if shares and first - value > _NOTABLE_LOSS else ""
        card.lines.append(line)
    return card


def _size(proof: Proof) -> Card:
    value = smaller(proof.size, proof.float_size, "×")
    note = f"{megabytes(proof.size)} instead of {megabytes(proof.float_size)}"
    return Card("Size against FP32", [Line("", value, note, proof.size / max(proof.float_size, 1))])


def _coverage(runtime: RuntimeProof) -> Line | None:
    if runtime.coverage is None:
        return Line(runtime.runtime, NOT_MEASURED, style="warn")
    integer = sum(o.integer for o in runtime.operators)
    weighted = {"multiply–adds": runtime.coverage_multiply_adds, "time": runtime.coverage_time}
    more = [f"{percent(share)} of {what}" for what, share in weighted.items() if share is not None]
    note = ", ".join([f"{integer} of {count(len(runtime.operators), 'operator')} executed", *more])
    return Line(runtime.runtime, percent(runtime.coverage), note, runtime.coverage)


def _speed(runtime: RuntimeProof) -> Line | None:
    if runtime.latency is None:
        return None
    time = runtime.latency
    note = f"{time.quantized_ms:.2f} ms instead of {time.float_ms:.2f} ms, {count(time.batch, 'sample')}, one thread"
    if time.default_speedup is not None:
        note += f"; with {time.default_precision}, this CPU's default: {time.default_speedup:.2f}×"
    if slower := runtime.slower_words():
        note += f"; {slower}"
    return Line(runtime.runtime, f"{time.speedup:.2f}×", note, style="" if time.speedup >= 1.0 else "bad")


def _memory(runtime: RuntimeProof) -> Line | None:
    if runtime.memory is None:
        return None
    taken = runtime.memory
    note = (
        f"{megabytes(taken.quantized_bytes)} instead of {megabytes(taken.float_bytes)}, without the runtime's package"
    )
    value = NOT_MEASURED if taken.share is None else f"{taken.share:.2f}×"
    return Line(runtime.runtime, value, note, style="bad" if (taken.share or 0) > 1 else "")


def _equal(runtime: RuntimeProof) -> Line | None:
    if runtime.equal is None:
        return Line(runtime.runtime, NOT_MEASURED, style="warn")
    chosen = [t for t in runtime.compared if t.kind == "activation"]
    note = f"{sum(t.values for t in chosen):,} values in {count(len(chosen), 'tensor')}"
    return Line(runtime.runtime, percent(runtime.equal, digits=3), note, runtime.equal)


def _gap(runtime: RuntimeProof) -> Line | None:
    worst = runtime.worst_output("relative")
    outputs = "outputs not compared" if worst is None else f"outputs differ by at most {percent(worst, digits=2)}"
    if runtime.largest is None:
        return Line(runtime.runtime, NOT_MEASURED, outputs, style="warn")
    line = Line(runtime.runtime, count(runtime.largest, "step"), outputs)
    if runtime.first_deviation is not None:
        why = f" ({runtime.diagnosis})" if runtime.diagnosis is not None else ""
        line.note = f"first above one step: {runtime.first_deviation.name}{why}; {outputs}"
    line.style = "warn" if runtime.first_deviation is not None or worst is None else ""
    return line
