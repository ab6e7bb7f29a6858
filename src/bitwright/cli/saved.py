"""``bitwright export`` and ``bitwright evaluate``: use a model that ``bitwright quantize --save`` wrote."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.options import (
    Dynamic,
    ExternalData,
    Format,
    InputName,
    Json,
    Opset,
    OutputName,
    PackWeights,
    export_options,
)
from bitwright.cli.output import print_json, print_text, stdout_kept_clean, step
from bitwright.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from bitwright.saving.manifest import Manifest

EXPORT_EPILOG = "Example: bitwright export saved/ -o model.onnx"
EVALUATE_EPILOG = "Example: bitwright evaluate saved/ --eval mypkg.nets:evaluate"

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A saved model.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FUNCTION",
        help="Builds the float model. By default the function that the folder names, which is then called: leave it "
        "out only if you trust the folder.",
    ),
]


def export(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the file.")],
    model: Model = None,
    format: Format = None,
    input_name: InputName = None,
    output_name: OutputName = None,
    opset: Opset = None,
    dynamic: Dynamic = None,
    external_data: ExternalData = False,
    pack_weights: PackWeights = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists already.")] = False,
    json: Json = False,
) -> None:
    """Write a saved model as the file that its target reads."""
    with stdout_kept_clean(json):
        from bitwright.exporting import export as write

        written = export_options(input_name, output_name, opset, dynamic, external_data, pack_weights)
        qmodel, _ = _load(folder, model)
        with step("exporting"):
            file = write(qmodel, output, format=format, overwrite=force, **written)
    if json:
        print_json({"file": str(file), "fingerprint": file.fingerprint.short})
    else:
        print_text(f"{file}: {file.fingerprint.short}")


def evaluate(
    folder: Folder,
    judge: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="MODULE:FUNCTION",
            help="Takes a model, returns a score or a dict of scores. By default, the function that the folder names.",
        ),
    ] = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Score the simulation of a saved model."""
    with stdout_kept_clean(json):
        from bitwright.cli.load import load
        from bitwright.cli.scores import score

        qmodel, manifest = _load(folder, model)
        name = judge or manifest.source.get("eval")
        if name is None:
            raise ConfigError(f"{str(folder)!r} does not name a function that evaluates: give --eval MODULE:FUNCTION")
        function = load(name, "--eval")
        if not callable(function):
            raise ConfigError(f"--eval {name} must be a function of the model, not {type(function).__name__}")
        with step("evaluating"):
            scores = score(function, qmodel, f"--eval {name}")
    if json:
        print_json({"folder": str(folder), "scores": scores})
    else:
        print_text(", ".join(f"{key} {value:.4g}" for key, value in scores.items()))


def _load(folder: Path, model: str | None) -> "tuple[nn.Module, Manifest]":
    from bitwright import saving
    from bitwright.cli.load import load_model
    from bitwright.saving.manifest import read_manifest

    manifest = read_manifest(folder)
    name = model or manifest.source.get("model")
    if name is None:
        raise ConfigError(f"{str(folder)!r} does not name a function that builds the model: give --model")
    with step("loading"):
        return saving.load(folder, load_model(name)), manifest
