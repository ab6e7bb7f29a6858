"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="MODULE:FUNCTION that returns the model (or an nn.Module).")
]
Backend = Annotated[
    str | None,
    typer.Option("--backend", "-b", metavar="NAME", help="Target to quantize for; see `bitwright backends`."),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="FILE", help="YAML file with wishes beyond the backend's defaults."),
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
        help="Layer that stays float: a name, glob, re:REGEX or op:OPERATOR (repeatable).",
    ),
]
Example = Annotated[
    str | None,
    typer.Option("--example", metavar="MODULE:FUNCTION", help="Gives example inputs: a tensor, tuple or dict."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else there.")]
