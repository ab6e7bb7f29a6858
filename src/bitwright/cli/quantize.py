"""``bitwright quantize``: all the way from a float model to a file with its proof and report."""

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.options import (
    Activation,
    Backend,
    Dynamic,
    Evaluate,
    Example,
    ExternalData,
    Format,
    InputName,
    Json,
    MaxDrop,
    MaxOutputDifference,
    MinCoverage,
    MinSpeedup,
    Model,
    NoLatency,
    Opset,
    OutputName,
    PackWeights,
    RecipeFile,
    RuntimeNames,
    Skip,
    Tune,
    Weight,
    export_options,
)
from bitwright.cli.output import stdout_kept_clean

EPILOG = (
    "Example: bitwright quantize mypkg.nets:build --data mypkg.nets:calibration --eval mypkg.nets:evaluate "
    "--backend onnxruntime -o out/"
)


def quantize(
    model: Model,
    data: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Returns batches to calibrate with: tensors, tuples of arguments or dicts. What comes after "
            "the arguments that the model needs, such as labels, is left out.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go.")],
    evaluate: Evaluate = None,
    example: Example = None,
    backend: Backend = None,
    recipe: RecipeFile = None,
    weight: Weight = None,
    activation: Activation = None,
    skip: Skip = None,
    tune: Tune = None,
    name: Annotated[
        str | None, typer.Option(metavar="FILE", help="Name of the file in the folder; 'model' by default.")
    ] = None,
    format: Format = None,
    input_name: InputName = None,
    output_name: OutputName = None,
    opset: Opset = None,
    dynamic: Dynamic = None,
    external_data: ExternalData = False,
    pack_weights: PackWeights = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Save the quantized model, too, for bitwright export and evaluate."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the calibration of an interrupted run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist already.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Write the file without running it.")] = False,
    runtime: RuntimeNames = None,
    no_latency: NoLatency = False,
    min_coverage: MinCoverage = None,
    min_equal: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="SHARE", help="Minimum share of values equal to the simulation, 0 to 1."),
    ] = None,
    max_gap: Annotated[
        int | None,
        typer.Option(min=0, metavar="STEPS", help="Largest allowed gap to the simulation, in steps; 1 by default."),
    ] = None,
    max_output_difference: MaxOutputDifference = None,
    min_speedup: MinSpeedup = None,
    max_accuracy_drop: MaxDrop = None,
    json: Json = False,
) -> None:
    """Quantize a model, write the file, prove that it does what was simulated, and write a report.

    Whatever can be refused is refused before any work begins. The file must do what the simulation does: no quantized
    value more than one step apart, no output further off than that explains. Exit code 1 means that this, or a limit,
    was missed.
    """
    with stdout_kept_clean(json):
        from bitwright.cli.job import Job
        from bitwright.cli.summary import show

        limits = {
            "coverage": min_coverage,
            "equal": min_equal,
            "largest": max_gap,
            "output": max_output_difference,
            "speedup": min_speedup,
        }
        wishes = (backend, recipe, weight, activation, skip or ())
        written = export_options(input_name, output_name, opset, dynamic, external_data, pack_weights)
        files = (output, name, format, written, force)
        checks = (runtime or None, not no_latency, limits, max_accuracy_drop)
        outcome = Job(model, data, evaluate, example, wishes, *files, *checks, save, resume, not no_verify, tune).run()
    if outcome is None:  # not the first rank
        return
    show(outcome, json)
    if outcome.proof.ok is not True and not no_verify:
        raise typer.Exit(1)
