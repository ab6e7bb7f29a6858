"""The command line: ``bitwright quantize``, ``export``, ``verify``, ``inspect`` and more. Help needs no torch."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from bitwright import __version__
from bitwright.cli import backends, inspect, migrate, quantize, recipe, saved, verify
from bitwright.cli.boundary import State, run

__all__ = ["app", "main"]

app = typer.Typer(
    name="bitwright",
    help="Quantizes PyTorch models, writes the file the hardware runs, and proves that the two agree.",
    epilog="Example: bitwright quantize mypkg.nets:build --data mypkg.nets:calibration -o out/",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quantize", epilog=quantize.EPILOG)(quantize.quantize)
app.command("export", epilog=saved.EXPORT_EPILOG)(saved.export)
app.command("evaluate", epilog=saved.EVALUATE_EPILOG)(saved.evaluate)
app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect)
app.command("verify", epilog=verify.VERIFY_EPILOG)(verify.verify)
app.command("compare", epilog=verify.COMPARE_EPILOG)(verify.compare)
app.command("migrate", epilog=migrate.EPILOG)(migrate.migrate)
app.add_typer(backends.app, name="backends")
app.add_typer(recipe.app, name="recipe")


@app.callback()
def _globals(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="BITWRIGHT_DEBUG", help="Show the whole trace of an error.")
    ] = False,
) -> None:
    context.ensure_object(State).debug = debug
    if version:
        typer.echo(f"bitwright {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: success. 1: a limit was missed. 2: something was refused, in one line on stderr. 130 and 143: ended by SIGINT or
    SIGTERM.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in given:  # it may appear anywhere
        given = ["--debug", *(a for a in given if a != "--debug")]
    return run(app, given)
