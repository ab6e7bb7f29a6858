"""``bitwright recipe``: show the schema, the presets or a recipe, and convert configs of other toolkits."""

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.options import Json
from bitwright.cli.output import print_json, print_table, write_text

app = typer.Typer(
    help="Show the schema of recipes, the presets, a recipe as it is read, or another toolkit's config as a recipe.",
    epilog="Example: bitwright recipe show W4A8",
    no_args_is_help=True,
)


@app.command("schema", epilog="Example: bitwright recipe schema -o recipe.schema.json")
def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file instead of stdout.")
    ] = None,
) -> None:
    """Print the JSON schema of recipes, for editors and other programs."""
    from bitwright.recipe import Recipe

    write_text(json_text.dumps(Recipe.schema(), indent=2, ensure_ascii=False) + "\n", output)


@app.command("presets", epilog="Example: bitwright recipe presets")
def presets(json: Json = False) -> None:
    """List the presets."""
    from bitwright.recipe import PRESETS, Recipe

    if json:
        print_json({"presets": {name: Recipe.parse(name).to_dict() for name in PRESETS}})
        return
    rows = [(p.name, p.title, Recipe.parse(p.name).backend) for p in PRESETS.values()]
    print_table(("name", "what it is", "backend"), rows, whole=("name",))


@app.command("show", epilog="Example: bitwright recipe show mine.yaml")
def show(
    source: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML or JSON file, or the name of a preset.")],
    json: Json = False,
) -> None:
    """Check a recipe, also against its backend, and print it as read."""
    from bitwright.preparation import resolve_recipe
    from bitwright.recipe import Recipe

    recipe = Recipe.parse(source)
    resolve_recipe(None, recipe, None, None, ())
    if json:
        print_json(recipe.to_dict())
        return
    typer.echo(recipe.to_yaml(), nl=False)


@app.command("convert", epilog="Example: bitwright recipe convert qconfig.yaml > recipe.yaml")
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML, JSON or Python file; it is read, not run.")],
    json: Json = False,
) -> None:
    """Print a config of Sparsebit, MQBench or QuanTransformer as a recipe; what has no equivalent goes to stderr."""
    from bitwright.compat.convert import convert as read

    dialect, recipe, notes = read(file)
    if json:
        print_json({"dialect": dialect, "recipe": recipe.to_dict(), "notes": notes})
        return
    typer.echo(f"# {file.name}: {dialect}")
    typer.echo(recipe.to_yaml(), nl=False)
    for note in notes:
        typer.echo(f"bitwright: no equivalent: {note}", err=True)
