"""``bitwright backends``: which targets exist, and what each of them does."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.cli.options import Json
from bitwright.cli.output import print_json, print_table, print_text

if TYPE_CHECKING:
    from bitwright.backends import Backend

app = typer.Typer(
    help="List the targets that exist, or show what one of them does.",
    epilog="Example: bitwright backends show onnxruntime",
    invoke_without_command=True,
)


@app.callback()
def list_backends(context: typer.Context, json: Json = False) -> None:
    """List the targets that exist, or show what one of them does."""
    if context.invoked_subcommand is not None:
        return
    from bitwright.backends import BACKENDS

    found = [BACKENDS.get(name) for name in BACKENDS]
    if json:
        print_json({"backends": [_summary(b) for b in found]})
        return
    rows = [(b.name, b.title, str(b.weight), str(b.activation), ", ".join(b.runtimes)) for b in found]
    print_table(("name", "what it is", "weights", "activations", "runs in"), rows, whole=("name",))


@app.command("show", epilog="Example: bitwright backends show onnxruntime")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the target.")],
    json: Json = False,
) -> None:
    """Show everything about one target."""
    from bitwright.backends import BACKENDS

    backend = BACKENDS.get(name)
    if json or (context.parent is not None and context.parent.params["json"]):
        print_json(_details(backend))
        return
    print_text(f"{backend.name}: {backend.title}", "bold")
    facts = [
        ("weights", f"{backend.weight} ({backend.weight_observer})"),
        ("activations", f"{backend.activation} ({backend.observer})"),
        ("method", backend.method),
        ("weight formats", _listing(backend.weight_formats)),
        ("activation formats", _listing(backend.activation_formats)),
        ("fused activations", _listing(backend.fused)),
        ("one scale for all inputs", _listing(backend.share_inputs)),
        ("runs in", ", ".join(backend.runtimes)),
    ]
    print_table(("", ""), [f for f in facts if f[1]], whole=("",))
    results = {"both": "inputs and result", "inputs": "inputs", "outputs": "result"}
    rows = [(operator, results[quantized]) for operator, quantized in backend.integer.items()]
    print_table(("runs in integers", "quantizers at"), rows)
    print_table(("stays float", "because"), list(backend.reasons.items()))
    for note in backend.notes:
        print_text(f"Note: {note}")


def _listing(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _summary(backend: "Backend") -> dict[str, Any]:
    return {
        "name": backend.name,
        "title": backend.title,
        "weight": str(backend.weight),
        "activation": str(backend.activation),
        "runtimes": backend.runtimes,
    }


def _details(backend: "Backend") -> dict[str, Any]:
    return _summary(backend) | {
        "integer": dict(backend.integer),
        "fused": backend.fused,
        "reasons": dict(backend.reasons),
        "share_inputs": backend.share_inputs,
        "weight_formats": backend.weight_formats,
        "activation_formats": backend.activation_formats,
        "observer": backend.observer,
        "weight_observer": backend.weight_observer,
        "method": backend.method,
        "notes": backend.notes,
    }
