"""``bitwright inspect``: a dry run that shows what would be quantized, by which rule, and what would not, and why."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.cli.options import Activation, Backend, Example, Json, Model, RecipeFile, Skip, Weight
from bitwright.cli.output import print_json, print_table, print_text, stdout_kept_clean, step

if TYPE_CHECKING:
    from torch import nn

    from bitwright.preparation import Ledger

EPILOG = "Example: bitwright inspect mypkg.nets:build --shape 1,3,224,224 --backend openvino"
EXAMPLE_NAME = "example_inputs"


def inspect(
    model: Model,
    example: Example = None,
    data: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Returns batches; the first is the example.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="Shape of a random float input, e.g. 1,3,224,224 (repeatable)."),
    ] = None,
    backend: Backend = None,
    recipe: RecipeFile = None,
    weight: Weight = None,
    activation: Activation = None,
    skip: Skip = None,
    json: Json = False,
) -> None:
    """Show what would be quantized, by which rule, and what stays float and why; nothing is written.

    Example inputs come from --example, --data or --shape, or else from example_inputs in the model's module.
    """
    with stdout_kept_clean(json):
        ledger = _dry_run(model, example, data, shape or [], (backend, recipe, weight, activation, skip or ()))
    if json:
        print_json({"model": model} | _data(ledger))
        return
    _print(model, ledger)


def _dry_run(
    target: str, example: str | None, data: str | None, shapes: list[str], wishes: tuple[Any, ...]
) -> "Ledger":
    from bitwright.cli.load import load, load_model
    from bitwright.preparation import ledger_of, prepare, resolve_recipe

    with step("building the model"):
        load(target, "the model")  # its module may register what the recipe names
        recipe, backend = resolve_recipe(*wishes)
        model = load_model(target)
    inputs = _example(target, model, example, data, shapes)
    with step("preparing"):
        return ledger_of(prepare(model, inputs, backend, recipe=recipe))


def _example(target: str, model: "nn.Module", example: str | None, data: str | None, shapes: list[str]) -> Any:  # noqa: ANN401
    from bitwright.cli.inputs import call_if_function, cut_to_model, example_of_shapes, read_batches
    from bitwright.cli.load import load, load_module
    from bitwright.errors import ConfigError

    if sum(map(bool, (example, data, shapes))) > 1:
        raise ConfigError("give only one of --example, --data and --shape")
    if example:
        return call_if_function(load(example, "--example"), f"--example {example}")
    if data:
        return cut_to_model(model, read_batches(load(data, "--data"), f"--data {data}").first())
    if shapes:
        return example_of_shapes(shapes)
    module = target.partition(":")[0]
    found = getattr(load_module(module, "the model"), EXAMPLE_NAME, None)
    if found is None:
        raise ConfigError(
            "the model needs example inputs: give --shape 1,3,224,224, --example MODULE:FUNCTION or --data "
            f"MODULE:FUNCTION, or define {EXAMPLE_NAME} in {module}"
        )
    return call_if_function(found, f"{module}:{EXAMPLE_NAME}")


def _data(ledger: "Ledger") -> dict[str, Any]:
    return {
        "backend": ledger.backend.name,
        "counts": _counts(ledger),
        "operators": [asdict(e) | {"verdict": e.verdict.value} for e in ledger.entries],
        "islands": ledger.islands,
        "notes": ledger.notes,
        "guards": [asdict(g) for g in ledger.guards],
    }


def _counts(ledger: "Ledger") -> dict[str, int]:
    return {verdict.value: count for verdict, count in ledger.count().items()}


def _print(target: str, ledger: "Ledger") -> None:
    headers = ("name", "operator", "computes", "input", "weight", "output", "rule", "reason")
    rows = [
        (e.name, e.operator, e.verdict.value, e.input, e.weight, e.output, e.rule, e.reason) for e in ledger.entries
    ]
    print_table(headers, rows, title=f"{target} for {ledger.backend.name}", whole=("computes",))
    print_text(", ".join(f"{count} {verdict}" for verdict, count in _counts(ledger).items()), "bold")
    if ledger.islands:
        islands = [(name or "(the model)", reason) for name, reason in ledger.islands.items()]
        print_table(("runs as written", "because"), islands)
    for guard in ledger.guards:
        print_text(f"Note: fixed by the example inputs: {guard.reader} of {guard.node} at {guard.where}")
    for note in ledger.notes:
        print_text(f"Note: {note}")
