"""The final summary of ``quantize``: one table, what stays float, what was missed, and where things are."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.cli.output import print_json, print_table, print_text
from bitwright.cli.scores import Scores
from bitwright.preparation import Ledger
from bitwright.reporting.text import NOT_MEASURED, megabytes, percent
from bitwright.verification import Proof, RuntimeProof
from bitwright.verification.violation import violations_in_words

_MOST_FLOAT = 10


@dataclass
class Outcome:
    """All results of quantizing a model; ``before``, ``simulated`` and ``deployed`` are scores, the last by runtime."""

    model: str
    ledger: Ledger
    proof: Proof
    report: Path
    before: Scores = field(default_factory=dict)
    simulated: Scores = field(default_factory=dict)
    deployed: dict[str, Scores] = field(default_factory=dict)

    @property
    def tuned(self) -> list[str]:
        """The findings of tuning for speed, if requested."""
        return self.ledger.tuned

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        scores = {"float": self.before, "simulated": self.simulated, "deployed": self.deployed}
        return {
            "model": self.model,
            "backend": self.ledger.backend.name,
            "file": self.proof.file,
            "report": str(self.report),
            "ok": self.proof.ok,
            "missed": self.proof.missed,
            "scores": scores if self.before else None,
            "operators": {verdict.value: count for verdict, count in self.ledger.count().items()},
            "tuned": self.tuned,
            "proof": self.proof.to_dict(),
        }


def show(outcome: Outcome, json: bool) -> None:
    """Print the outcome for people, or as JSON."""
    if json:
        print_json(outcome.to_dict())
        return
    proof = outcome.proof
    runtimes = proof.runtimes
    headers = ["", "FP32", "simulation", *(f"{p.runtime} {p.version}" for p in runtimes.values())]
    print_table(headers, _rows(outcome), title=f"{outcome.model} for {outcome.ledger.backend.name}", right=headers[1:])
    for name, runtime in runtimes.items():
        _print_float(name, runtime)
        if slower := runtime.slower_words():
            print_text(f"{name}: {slower}")
    _print_all("Advice", violations_in_words(v for v in proof.violations if v.advice))
    _print_all("Note", [*outcome.tuned, *proof.notes])
    _print_all("Missed", proof.missed, "bold red")
    print_text(proof.verdict[0].upper() + proof.verdict[1:], "bold green" if proof.ok else "bold red")
    print_text(f"File:   {proof.file}")
    print_text(f"Report: {outcome.report}")


def _print_all(kind: str, lines: Iterable[str], style: str = "") -> None:
    for line in lines:
        print_text(f"{kind}: {line}", style)


_MEASURED: dict[str, Callable[[RuntimeProof], str]] = {
    "operators in integers": lambda p: (
        f"{sum(o.integer for o in p.operators)}/{len(p.operators)} ({percent(p.coverage)})"
    ),
    "multiply–adds in integers": lambda p: percent(p.coverage_multiply_adds),
    "values equal to the simulation": lambda p: percent(p.equal, digits=3),
    "largest gap in steps": lambda p: NOT_MEASURED if p.largest is None else str(p.largest),
    "outputs differ by": lambda p: percent(p.worst_output("relative"), digits=2),
    "latency": lambda p: f"{p.latency.quantized_ms:.2f} ms" if p.latency else "",
    "peak memory": lambda p: megabytes(p.memory.quantized_bytes) if p.memory else "",
    "peak memory of FP32 there": lambda p: megabytes(p.memory.float_bytes) if p.memory else "",
    "speed against FP32 there": lambda p: f"{p.latency.speedup:.2f}x" if p.latency else "",
}


def _rows(outcome: Outcome) -> list[list[str]]:
    proof, found = outcome.proof, outcome.proof.runtimes.values()
    scores: dict[str, Scores] = {"simulation": outcome.simulated, **outcome.deployed}
    rows = [
        [key, *(f"{s[key]:.4g}" if key in s else "" for s in (outcome.before, *_columns(scores, proof)))]
        for key in outcome.before
    ]
    rows += [row for name, text in _MEASURED.items() if any((row := [name, "", "", *map(text, found)])[3:])]
    return [*rows, ["size", megabytes(proof.float_size), "", *(megabytes(proof.size) for _ in found)]]


def _columns(scores: dict[str, Scores], proof: Proof) -> list[Scores]:
    return [scores.get(name, {}) for name in ("simulation", *proof.runtimes)]


def _print_float(runtime: str, proof: RuntimeProof) -> None:
    stays = proof.floats
    rows = [(o.name, o.kind, o.reason) for o in stays[:_MOST_FLOAT]]
    if rows:
        print_table((f"float in {runtime}", "kind", "because"), rows)
    if len(stays) > _MOST_FLOAT:
        print_text(f"  and {len(stays) - _MOST_FLOAT} more: see the report")
