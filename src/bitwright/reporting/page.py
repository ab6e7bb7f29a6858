"""report: gather what is known about a quantized model and write it as one HTML page."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import torch
from markupsafe import Markup
from torch import nn

import bitwright
from bitwright.analysis import LayerStats, TensorStats, analyze, outline
from bitwright.errors import ConfigError
from bitwright.files import atomic_write, check_output
from bitwright.preparation import Ledger, Verdict, ledger_of
from bitwright.reporting import charts, text
from bitwright.reporting.cards import cards
from bitwright.reporting.graph import pictures

if TYPE_CHECKING:  # the package of proofs needs onnx, but a report does not
    from bitwright.verification.proof import Proof

_WORST = 8


def _check_accuracy(accuracy: Mapping[str, Any]) -> None:
    for label, score in accuracy.items():
        if not isinstance(score, int | float):
            raise ConfigError(f"accuracy must be a number for each label, not {score!r} for {label!r}")


def report(
    model: nn.Module,
    proof: Proof | None,
    path: str | os.PathLike[str],
    *,
    stats: list[LayerStats] | None = None,
    batches: Iterable[Any] | None = None,
    accuracy: Mapping[str, float] | None = None,
    title: str | None = None,
) -> Path:
    """Write one self-contained HTML page about a prepared model.

    Args:
        model: the model; the more has been done to it (calibrated, verified), the more the page shows.
        proof: the result of ``verify``; None omits that part of the page.
        path: the file to write, whole or not at all.
        stats: the result of ``analyze``.
        batches: data to analyze now if there are no stats. Without either, the page shows no errors.
        accuracy: scores by their label, the float model's first: ``{"FP32": 0.982, "INT8": 0.981}``.
        title: heading of the page; the name of the model's class by default.

    Returns:
        The path of the page.
    """
    target = check_output(path)
    ledger = ledger_of(model)
    _check_accuracy(accuracy or {})
    if stats is None:
        stats = outline(model) if batches is None else analyze(model, batches)
    html = _render(
        title=title or type(model).__name__,
        ledger=ledger,
        proof=proof,
        file=Path(proof.file).name if proof is not None else "",
        cards=cards(proof, accuracy),
        violations=_constraints(proof),
        verdicts=[(v.value, ledger.count()[v]) for v in Verdict],
        kept_float=_float_groups(ledger),
        run_float=_run_in_float(proof),
        layers=stats,
        measured=any(s.output.sqnr is not None or s.weight.sqnr is not None for s in stats),
        worst=_worst(stats),
        pictures=pictures(model, ledger),
        versions=_versions(proof),
    )
    with atomic_write(target) as partial:
        partial.write_text(html, encoding="utf-8")
    return target


@dataclass
class FloatGroup:
    """Operators of one kind that are float for the same reason."""

    operator: str
    reason: str
    names: list[str]


def _float_groups(ledger: Ledger) -> list[FloatGroup]:
    """The operators left in float, most frequent first, then those that compute no float tensor."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in ledger.entries:
        if entry.verdict is Verdict.FLOAT:
            groups[entry.operator, entry.reason].append(entry.name)
    made = [FloatGroup(operator, reason, names) for (operator, reason), names in groups.items()]
    return sorted(made, key=lambda g: (g.reason == "not a float tensor", -len(g.names)))


def _run_in_float(proof: Proof | None) -> dict[str, list[FloatGroup]]:
    """By runtime, the operators that it executes in float."""
    return {
        name: [
            FloatGroup(kind, f"{reason or 'no reason known'} (runs as {runs_as})", names)
            for (kind, runs_as, reason), names in runtime.float_groups().items()
        ]
        for name, runtime in (proof.runtimes if proof is not None else {}).items()
        if runtime.floats
    }


def _constraints(proof: Proof | None) -> list[tuple[str, str, list[str]]]:
    """The target's constraints on files, and where this one breaks them."""
    if proof is None:
        return []
    from bitwright.verification.violation import violations_in_words

    broken = {name: [v for v in proof.violations if v.constraint == name] for name in proof.constraints}
    return [(name, text, violations_in_words(broken[name])) for name, text in proof.constraints.items()]


@dataclass
class Worst:
    """A layer that loses a lot, and its tensors by kind."""

    layer: LayerStats
    tensors: dict[str, TensorStats]


def _worst(stats: list[LayerStats]) -> list[Worst]:
    """The integer operators with the least signal over noise; activations count with their operator."""
    ranked = sorted(
        (s for s in stats if s.output.sqnr is not None and s.verdict is Verdict.INTEGER and s.output.histogram),
        key=lambda s: s.output.sqnr or 0.0,
    )
    made = []
    for layer in ranked[:_WORST]:
        tensors = {"Input": layer.input, "Output": layer.output, "Weight": layer.weight}
        made.append(Worst(layer, {kind: t for kind, t in tensors.items() if t.histogram is not None}))
    return made


def _versions(proof: Proof | None) -> dict[str, str]:
    versions = {"Bitwright": bitwright.__version__, "PyTorch": torch.__version__}
    for runtime in proof.runtimes.values() if proof is not None else []:
        versions[runtime.runtime] = runtime.version
    return versions | {"Python": platform.python_version(), "machine": platform.machine()}


def _render(**context: object) -> str:  # the template is strict: a name it does not find is an error
    files = resources.files("bitwright.reporting")
    style, script = (files.joinpath(name).read_text("utf-8") for name in ("style.css", "script.js"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": text.percent,
        "number": text.number,
        "interval": text.interval,
        "decibels": text.decibels,
        "bar": charts.bar,
        "grade": charts.grade,
    }
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(files.joinpath("template.html").read_text("utf-8")).render(
        **context,
        histogram=charts.histogram,
        count=text.count,
        style=Markup(style),
        script=Markup(script),
        script_hash=digest,
    )
