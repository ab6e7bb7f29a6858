"""``bitwright quantize``: the whole road, from a float model to a file with its proof and report."""

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.options import Activation, Backend, Example, Json, Model, RecipeFile, Skip, Weight
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
            help="Gives batches to calibrate with: tensors, tuples of arguments or dicts. What comes after "
            "the arguments that the model needs, such as labels, is left out.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go.")],
    evaluate: Annotated[
        str | None,
        typer.Option("--eval", metavar="MODULE:FUNCTION", help="Takes a model, returns a score or a dict of scores."),
    ] = None,
    example: Example = None,
    backend: Backend = None,
    recipe: RecipeFile = None,
    weight: Weight = None,
    activation: Activation = None,
    skip: Skip = None,
    name: Annotated[
        str | None, typer.Option(metavar="FILE", help="Name of the file in the folder; 'model' by default.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="Format of the file; by default what the target reads.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Save the quantized model, too, for bitwright export and evaluate."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the calibration of a run that was interrupted.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist already.")] = False,
    runtime: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Where to run the file (repeatable); by default all that are installed."),
    ] = None,
    no_latency: Annotated[bool, typer.Option("--no-latency", help="Do not measure the speed.")] = False,
    min_coverage: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="SHARE", help="Least share of executed operators in integers, 0 to 1."),
    ] = None,
    min_equal: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="SHARE", help="Least share of values equal to the simulation, 0 to 1."),
    ] = None,
    max_gap: Annotated[
        int | None, typer.Option(min=0, metavar="STEPS", help="Largest gap to the simulation, in steps; 1 by default.")
    ] = None,
    max_output_difference: Annotated[
        float | None,
        typer.Option(min=0, metavar="SHARE", help="Largest difference of an output, as a share of its magnitude."),
    ] = None,
    min_speedup: Annotated[float | None, typer.Option(min=0, metavar="TIMES", help="Least speed against FP32.")] = None,
    max_accuracy_drop: Annotated[
        float | None,
        typer.Option(min=0, metavar="DROP", help="Most that the (first) score of --eval may drop."),
    ] = None,
    json: Json = False,
) -> None:
    """Quantize a model, write the file, prove that it does what was simulated, and write a report.

    What can be refused is refused before any work begins. The file must do what the simulation does: no quantized value
    more than one step apart, no output beyond what that explains. Exit code 1 means that this, or a limit, was missed.
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
        files = (output, name, format, force)
        checks = (runtime, not no_latency, limits, max_accuracy_drop)
        outcome = Job(model, data, evaluate, example, wishes, *files, *checks, save, resume).run()
    if outcome is None:  # not the first rank
        return
    show(outcome, json)
    if outcome.proof.ok is not True:
        raise typer.Exit(1)
