"""Options that several commands have."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from bitwright.errors import ConfigError

_SIZE = re.compile(r"(?P<argument>[^:=]+):(?P<axis>-?\d{1,3})=(?P<size>[^:=]+)")

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
        help="YAML or JSON file with settings beyond the backend's defaults, or a preset such as W4A8.",
    ),
]
Weight = Annotated[
    str | None,
    typer.Option(
        "--weight",
        metavar="SPEC",
        help="Spec of all weights, e.g. 'int8 narrow channel:0'; 'auto' for as many bits as are safe on this CPU.",
    ),
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
    typer.Option("--example", metavar="MODULE:FUNCTION", help="Returns example inputs: a tensor, tuple or dict."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else there.")]
Evaluate = Annotated[
    str | None,
    typer.Option("--eval", metavar="MODULE:FUNCTION", help="Takes a model, returns a score or a dict of scores."),
]
RuntimeNames = Annotated[
    list[str] | None,
    typer.Option(
        "--runtime", metavar="NAME", help="Where to run the file (repeatable); by default where its target runs."
    ),
]
Tune = Annotated[
    str | None,
    typer.Option(
        metavar="speed", help="Time the file and leave in float what is slower in integers; exports repeatedly."
    ),
]
Format = Annotated[
    str | None, typer.Option(metavar="NAME", help="Format of the file; by default what the target reads.")
]
InputName = Annotated[
    list[str] | None,
    typer.Option("--input-name", metavar="NAME", help="Name of an input in the file (once for each, in order)."),
]
OutputName = Annotated[
    list[str] | None,
    typer.Option("--output-name", metavar="NAME", help="Name of an output in the file (once for each, in order)."),
]
Opset = Annotated[
    int | None,
    typer.Option("--opset", metavar="N", help="ONNX opset; by default the lowest that can express the model."),
]
Dynamic = Annotated[
    list[str] | None,
    typer.Option(
        "--dynamic",
        metavar="ARGUMENT:AXIS=SIZE",
        help="Size that stays free in the file, as x:0=batch (repeatable; 'none' fixes all). By default, "
        "every size that the model accepts in other values.",
    ),
]
ExternalData = Annotated[
    bool,
    typer.Option("--external-data", help="Store large tensors in a second file; automatic above 2 GB."),
]
PackWeights = Annotated[
    bool,
    typer.Option("--pack-weights", help="Store weights of up to 4 bits in 4 bits; onnxruntime computes them in float."),
]
NoLatency = Annotated[bool, typer.Option("--no-latency", help="Do not measure the speed.")]
MinCoverage = Annotated[
    float | None,
    typer.Option(min=0, max=1, metavar="SHARE", help="Minimum share of executed operators in integers, 0 to 1."),
]
MaxOutputDifference = Annotated[
    float | None,
    typer.Option(min=0, metavar="SHARE", help="Largest allowed difference of an output, as a share of its magnitude."),
]
MinSpeedup = Annotated[float | None, typer.Option(min=0, metavar="TIMES", help="Minimum speedup over FP32.")]
MaxDrop = Annotated[
    float | None, typer.Option(min=0, metavar="DROP", help="Largest allowed drop of the (first) score of --eval.")
]


def export_options(
    input_names: list[str] | None,
    output_names: list[str] | None,
    opset: int | None,
    dynamic: list[str] | None,
    external_data: bool,
    pack_weights: bool,
) -> dict[str, Any]:
    """The arguments of ``bitwright.export`` that the options stand for."""
    return {
        "input_names": input_names or None,
        "output_names": output_names or None,
        "opset_version": opset,
        "dynamic_shapes": _shapes(dynamic),
        "external_data": external_data or None,
        "pack_weights": pack_weights,
    }


def _shapes(sizes: list[str] | None) -> bool | dict[str, dict[int, str]]:
    if not sizes or sizes == ["none"]:
        return not sizes
    shapes: dict[str, dict[int, str]] = {}
    for size in sizes:
        found = _SIZE.fullmatch(size)
        if found is None:
            raise ConfigError(f"--dynamic {size!r} is not ARGUMENT:AXIS=SIZE, as x:0=batch")
        shapes.setdefault(found["argument"], {})[int(found["axis"])] = found["size"]
    return shapes


def check_limits(
    min_speedup: float | None, *, latency: bool, max_accuracy_drop: float | None, evaluate: str | None
) -> None:
    """Refuse limits on what is not going to be measured."""
    if min_speedup is not None and not latency:
        raise ConfigError("--min-speedup needs the speed to be measured: leave out --no-latency")
    if max_accuracy_drop is not None and evaluate is None:
        raise ConfigError("--max-accuracy-drop needs --eval, to know the accuracy")
