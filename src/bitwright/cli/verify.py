"""``bitwright verify`` and ``bitwright compare``: run existing files, for pipelines."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from xml.etree import ElementTree

import typer

from bitwright.cli.options import (
    Evaluate,
    Json,
    MaxDrop,
    MaxOutputDifference,
    MinCoverage,
    MinSpeedup,
    NoLatency,
    RuntimeNames,
    check_limits,
)
from bitwright.cli.output import print_json, print_text, stdout_kept_clean, step, write_text
from bitwright.errors import ConfigError

if TYPE_CHECKING:
    from bitwright.cli.inputs import Batches
    from bitwright.cli.scores import Scores
    from bitwright.verification import Proof, RuntimeProof

VERIFY_EPILOG = "Example: bitwright verify out/ --data mypkg.nets:calibration --min-coverage 0.9 --junit verify.xml"
COMPARE_EPILOG = "Example: bitwright compare before.onnx after.onnx --data mypkg.nets:calibration"
Data = Annotated[
    str, typer.Option(metavar="MODULE:FUNCTION", help="Returns batches for the file: tensors, tuples or dicts.")
]


Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the findings as JUnit XML.")]


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file, or a folder with one.")],
    data: Data,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Returns the float model; with --saved, the file is proven."),
    ] = None,
    saved: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The exported model, as bitwright.save wrote it.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", "-b", metavar="NAME", help="Target whose published constraints the file must keep."),
    ] = None,
    evaluate: Evaluate = None,
    runtime: RuntimeNames = None,
    no_latency: NoLatency = False,
    min_coverage: MinCoverage = None,
    max_output_difference: MaxOutputDifference = None,
    min_speedup: MinSpeedup = None,
    max_accuracy_drop: MaxDrop = None,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Run an existing file and judge it; exit code 1 means that a limit was missed.

    With --model and --saved, the file must do what that model simulates. Without them, its outputs are compared with
    what the file should compute according to ONNX, and only the given limits are judged.
    """
    _check_source(model, saved, backend)
    check_limits(min_speedup, latency=not no_latency, max_accuracy_drop=max_accuracy_drop, evaluate=evaluate)
    given = {"coverage": min_coverage, "output": max_output_difference, "speedup": min_speedup}
    limits = {name: value for name, value in given.items() if value is not None}
    with stdout_kept_clean(json):
        from bitwright.cli.inputs import read_batches
        from bitwright.cli.load import load

        path = _file_in(file)
        batches = read_batches(load(data, "--data"), f"--data {data}")
        judge = load(evaluate, "--eval") if evaluate else None
        proof = _proof(path, batches, (model, saved, backend), runtime, limits=limits, latency=not no_latency)
        scores = _scores(path, judge, f"--eval {evaluate}", proof, max_accuracy_drop) if judge is not None else None
    if junit is not None:
        write_text(_junit(proof), junit)
    if json:
        print_json(proof.to_dict() | {"scores": scores})
    else:
        _print_proof(proof, scores or {})
    if proof.ok is False:
        raise typer.Exit(1)


def _check_source(model: str | None, saved: Path | None, backend: str | None) -> None:
    if (model is None) != (saved is None):
        raise ConfigError("--model and --saved go together: the float model, and the folder that bitwright.save wrote")
    if saved is not None and backend is not None:
        raise ConfigError("a saved model knows its backend: leave out --backend")


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A file, or a folder with one.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The file to compare with it.")],
    data: Data,
    evaluate: Evaluate = None,
    runtime: Annotated[str, typer.Option(metavar="NAME", help="Where to run both.")] = "onnxruntime",
    min_coverage: MinCoverage = None,
    max_output_difference: MaxOutputDifference = None,
    max_accuracy_drop: MaxDrop = None,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Run two files on the same data: how far apart their outputs are, and which is faster and more accurate.

    The limits apply to B; drops in accuracy count from A. Exit code 1 means that a limit was missed, or that the files
    have different outputs.
    """
    check_limits(None, latency=True, max_accuracy_drop=max_accuracy_drop, evaluate=evaluate)
    given = {"coverage": min_coverage, "output": max_output_difference}
    with stdout_kept_clean(json):
        from bitwright.cli.inputs import read_batches
        from bitwright.cli.load import load
        from bitwright.verification.alone import compare_files

        a, b = _file_in(first), _file_in(second)
        judge = load(evaluate, "--eval") if evaluate else None
        found = compare_files(a, b, read_batches(load(data, "--data"), f"--data {data}"), runtime=runtime)
        proof = _comparison(a, b, found, given)
        scores = _both_scores(a, b, judge, f"--eval {evaluate}", runtime) if judge is not None else {}
        if max_accuracy_drop is not None:
            _judge_drop(proof, scores[str(a)], {runtime: scores[str(b)]}, max_accuracy_drop)
    if junit is not None:
        write_text(_junit(proof), junit)
    if json:
        measured = {"largest": found.worst_output("relative"), "scores": scores or None, "missed": proof.missed}
        print_json({"a": str(a), "b": str(b), **proof.to_dict()["runtimes"][runtime], **measured})
    else:
        _print_comparison(found, a, b, scores, proof.missed)
    if proof.missed:
        raise typer.Exit(1)


def _comparison(a: Path, b: Path, found: "RuntimeProof", given: dict[str, float | None]) -> "Proof":
    """Compare a file with another, judged by the given limits; all outputs must exist."""
    from dataclasses import replace

    from bitwright.verification import Proof
    from bitwright.verification.limits import NO_LIMITS

    bounds = replace(NO_LIMITS, **given)  # pyrefly: ignore
    made = Proof(str(b), b.stat().st_size, a.stat().st_size, {found.runtime: found}, bounds)
    made.missed += bounds.missed_by(found)
    return made


def _both_scores(a: Path, b: Path, judge: Callable[[Any], Any], name: str, runtime: str) -> "dict[str, Scores]":
    """The scores of both files."""
    from bitwright.cli.scores import DeployedModel, score
    from bitwright.verification import run_file

    before = score(judge, DeployedModel(run_file(a, runtime)), f"{name} on {a}")
    return {str(a): before, str(b): score(judge, DeployedModel(run_file(b, runtime)), f"{name} on {b}", before)}


def _file_in(path: Path) -> Path:
    """The file, or the only one of a known format in a folder."""
    if not path.is_dir():
        return path
    from bitwright.exporting import FORMATS

    endings = {FORMATS.get(name).suffix for name in FORMATS}
    found = sorted(p for p in path.iterdir() if p.suffix in endings)
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        raise ConfigError(f"the folder {str(path)!r} must have one file to run; it has {names}")
    return found[0]


def _proof(
    path: Path,
    batches: "Batches",
    made_of: tuple[str | None, Path | None, str | None],
    runtimes: list[str] | None,
    *,
    limits: dict[str, float],
    latency: bool,
) -> "Proof":
    """Verify the file against the saved model's simulation, or against ONNX's definition."""
    model, saved, backend = made_of
    if model is None or saved is None:
        from bitwright.verification.alone import check_file

        return check_file(path, batches, runtimes=runtimes, backend=backend, limits=limits, latency=latency)
    from bitwright.cli.load import load_model
    from bitwright.saving import load as load_saved
    from bitwright.verification import verify as prove

    with step("loading the model"):
        qmodel = load_saved(saved, load_model(model))
    return prove(qmodel, path, batches, runtimes=runtimes or None, limits=limits, latency=latency)


def _scores(
    path: Path, judge: Callable[[Any], Any], name: str, proof: "Proof", allowed: float | None
) -> dict[str, dict[str, float]]:
    """The scores of the float twin and of the file in each runtime."""
    from bitwright.cli.scores import DeployedModel, score
    from bitwright.verification import run_file

    before: Scores = {}
    after: dict[str, Scores] = {}
    for runtime in [n for n, found in proof.runtimes.items() if not found.crash]:
        if not before:
            before = score(judge, DeployedModel(run_file(path, runtime, quantized=False)), f"{name} on FP32")
        after[runtime] = score(judge, DeployedModel(run_file(path, runtime)), f"{name} in {runtime}", before)
    if allowed is not None:
        _judge_drop(proof, before, after, allowed)
    return {"FP32": before, **after}


def _judge_drop(proof: "Proof", before: "Scores", after: "Mapping[str, Scores]", allowed: float) -> None:
    from bitwright.cli.scores import missed_drop
    from bitwright.verification.limits import NO_LIMITS

    proof.missed += missed_drop(before, after, allowed)
    proof.limits = proof.limits or NO_LIMITS  # it was judged, if only by this


def _print_proof(proof: "Proof", scores: Mapping[str, Mapping[str, float]]) -> None:
    print_text(str(proof))
    _print_scores(scores)


def _print_scores(scores: "Mapping[str, Mapping[str, float]]") -> None:
    for where, found in scores.items():
        print_text(f"{where}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))


def _print_comparison(
    found: "RuntimeProof", a: Path, b: Path, scores: "Mapping[str, Scores]", missed: list[str]
) -> None:
    for output in found.outputs:
        far = output.problem or f"differs by at most {output.relative or 0.0:.3%} of its magnitude"
        print_text(f"{output.name} {far}")
    if found.latency is not None:
        time = found.latency
        print_text(f"{b}: {time.quantized_ms:.2f} ms; {a}: {time.float_ms:.2f} ms ({found.runtime})")
    _print_scores(scores)
    for line in missed:
        print_text(f"Missed: {line}", "bold red")


def _junit(proof: "Proof") -> str:
    """One test per runtime and constraint, which fails if a limit was missed there, and one for all else missed.

    Tests count as skipped if there were no limits.
    """
    cases = _cases(proof)
    failures, skipped = sum(map(bool, cases.values())), len(cases) if proof.ok is None else 0
    counts = {"tests": str(len(cases)), "failures": str(failures), "skipped": str(skipped)}
    suite = ElementTree.Element("testsuite", {"name": "bitwright verify", **counts})
    for name, missed in cases.items():
        case = ElementTree.SubElement(suite, "testcase", classname=proof.file, name=name)
        if missed:
            ElementTree.SubElement(case, "failure", message=missed[0]).text = "\n".join(missed)
        if skipped:
            ElementTree.SubElement(case, "skipped", message="measured, not judged: no limits were set")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _cases(proof: "Proof") -> dict[str, list[str]]:
    """What was missed, by runtime or constraint."""
    cases: dict[str, list[str]] = {name: [] for name in (*proof.runtimes, *proof.constraints)}
    for line in proof.missed:
        name = line.partition(": ")[0]
        cases.setdefault(name if name in cases else "limits", []).append(line)
    return cases
