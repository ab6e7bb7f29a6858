"""What ``quantize`` says at the end: one table, what stays float, what was missed, and where things are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.cli.output import print_json, print_table, print_text
from bitwright.cli.scores import Scores
from bitwright.preparation import Ledger
from bitwright.reporting.text import NOT_MEASURED, megabytes, percent
from bitwright.verification import Proof, RuntimeProof

_MOST_FLOAT = 10


@dataclass
class Outcome:
    """All that came out of quantizing one model.

    Attributes:
        model: the model as the user named it.
        ledger: what was done to each operator.
        proof: what was found about the file.
        report: where the report is.
        before: scores of the float model.
        simulated: scores of the simulation.
        deployed: scores of the file, by runtime.
    """

    model: str
    ledger: Ledger
    proof: Proof
    report: Path
    before: Scores = field(default_factory=dict)
    simulated: Scores = field(default_factory=dict)
    deployed: dict[str, Scores] = field(default_factory=dict)

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
    for note in proof.notes:
        print_text(f"Note: {note}")
    for miss in proof.missed:
        print_text(f"Missed: {miss}", "bold red")
    print_text(proof.verdict[0].upper() + proof.verdict[1:], "bold green" if proof.ok else "bold red")
    print_text(f"File:   {proof.file}")
    print_text(f"Report: {outcome.report}")


def _rows(outcome: Outcome) -> list[list[str]]:
    proof = outcome.proof
    found = proof.runtimes.values()
    rows = [
        [
            key,
            f"{value:.4g}",
            f"{outcome.simulated[key]:.4g}",
            *_scores(key, proof.runtimes, outcome.deployed),
        ]
        for key, value in outcome.before.items()
    ]
    rows.append(["operators in integers", "", "", *(_coverage(p) for p in found)])
    rows.append(["multiply–adds in integers", "", "", *(percent(p.coverage_multiply_adds) for p in found)])
    rows.append(["values equal to the simulation", "", "", *(percent(p.equal, digits=3) for p in found)])
    gaps = [NOT_MEASURED if p.largest is None else str(p.largest) for p in found]
    rows.append(["largest gap in steps", "", "", *gaps])
    rows.append(["outputs differ by", "", "", *(percent(p.worst_output("relative"), digits=2) for p in found)])
    if any(p.latency for p in found):
        times = [f"{p.latency.quantized_ms:.2f} ms" if p.latency else "" for p in found]
        rows.append(["latency", "", "", *times])
        speeds = [f"{p.latency.speedup:.2f}x" if p.latency else "" for p in found]
        rows.append(["speed against FP32 there", "", "", *speeds])
    return [*rows, ["size", megabytes(proof.float_size), "", *(megabytes(proof.size) for _ in found)]]


def _scores(key: str, runtimes: Mapping[str, RuntimeProof], deployed: Mapping[str, Scores]) -> list[str]:
    return [f"{deployed[name][key]:.4g}" if name in deployed else "" for name in runtimes]


def _coverage(proof: RuntimeProof) -> str:
    return f"{sum(o.integer for o in proof.operators)}/{len(proof.operators)} ({percent(proof.coverage)})"


def _print_float(runtime: str, proof: RuntimeProof) -> None:
    stays = proof.floats
    rows = [(o.name, o.kind, o.reason) for o in stays[:_MOST_FLOAT]]
    if rows:
        print_table((f"float in {runtime}", "kind", "because"), rows)
    if len(stays) > _MOST_FLOAT:
        print_text(f"  and {len(stays) - _MOST_FLOAT} more: see the report")
