"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="MODULE:FUNCTION that returns the model (or an nn.Module).")
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAME",
        help="Target to quantize for, or a YAML file with one; see `bitwright backends`.",
    ),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        metavar="FILE",
        help="YAML or JSON file with wishes beyond the backend's defaults, or a preset's name, as W4A8.",
    ),
]
Weight = Annotated[
    str | None,
    typer.Option("--weight", metavar="SPEC", help="Spec of all weights, e.g. 'int8 narrow channel:0'."),
]
Activation = Annotated[
    str | None,
    typer.Option("--activation", metavar="SPEC", help="Spec of all activations, e.g. 'uint8 affine'."),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip",
        metavar="NAME",
        help="Layer that stays float: a name, glob, re:REGEX, op:OPERATOR or type:CLASS (repeatable).",
    ),
]
Example = Annotated[
    str | None,
    typer.Option("--example", metavar="MODULE:FUNCTION", help="Gives example inputs: a tensor, tuple or dict."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else there.")]
