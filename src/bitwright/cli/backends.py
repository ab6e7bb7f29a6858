"""``bitwright backends``: list the targets, or show what one of them does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.cli.options import Json
from bitwright.cli.output import print_json, print_table, print_text, write_text

if TYPE_CHECKING:
    from bitwright.backends import Backend

app = typer.Typer(
    help="List the targets, or show what one of them does.",
    epilog="Example: bitwright backends show onnxruntime",
    invoke_without_command=True,
)


@app.callback()
def list_backends(context: typer.Context, json: Json = False) -> None:
    """List the targets, or show what one of them does."""
    if context.invoked_subcommand is not None:
        return
    from bitwright.backends import BACKENDS
    from bitwright.backends.table import spec_text

    found = [BACKENDS.get(name) for name in BACKENDS]
    if json:
        print_json({"backends": [_summary(b) for b in found]})
        return
    rows = [(b.name, b.title, spec_text(b.weights), spec_text(b.activations), ", ".join(b.runtimes)) for b in found]
    print_table(("name", "what it is", "weights", "activations", "runs in"), rows, whole=("name",))


@app.command("show", epilog="Example: bitwright backends show onnxruntime")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the target, or a YAML file that describes one.")],
    json: Json = False,
) -> None:
    """Show everything about one target."""
    from bitwright.backends import find_backend
    from bitwright.backends.table import PLACES, summary

    backend = find_backend(name)
    if json or (context.parent is not None and context.parent.params["json"]):
        print_json(_details(backend))
        return
    print_text(f"{backend.name}: {backend.title}", "bold")
    print_table(("", ""), summary(backend), whole=("",))
    rows = [(operator, PLACES[place]) for operator, place in backend.operators.integer.items()]
    print_table(("runs in integers", "quantizers at"), rows)
    if backend.operators.reasons:
        print_table(("stays float", "because"), list(backend.operators.reasons.items()))
    for note in backend.notes:
        print_text(f"Note: {note}")


@app.command("matrix", epilog="Example: bitwright backends matrix -o docs/reference/backends.md")
def matrix(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file instead of stdout.")
    ] = None,
) -> None:
    """Write the documentation page that says which operators and formats work where."""
    from bitwright.backends import BACKENDS
    from bitwright.backends.table import page

    write_text(page([BACKENDS.get(name) for name in BACKENDS]), output)


def _summary(backend: "Backend") -> dict[str, Any]:
    specs = {kind: getattr(backend, kind).spec for kind in ("weights", "activations")}
    texts = {kind: None if spec is None else str(spec) for kind, spec in specs.items()}
    return {"name": backend.name, "title": backend.title, **texts, "runtimes": backend.runtimes}


def _details(backend: "Backend") -> dict[str, Any]:
    from bitwright.backends.rules import IN_PYTHON

    everything = backend.model_dump(exclude={"operators": set(IN_PYTHON)})
    everything["operators"] |= {rule: sorted(getattr(backend.operators, rule)) for rule in IN_PYTHON}
    return everything
