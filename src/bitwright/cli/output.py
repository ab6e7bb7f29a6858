"""Output of commands: tables and one JSON object on stdout, progress on stderr."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

# A redirected table keeps its lines unbroken.
_REDIRECTED_WIDTH = 1000


def print_json(data: Mapping[str, Any]) -> None:
    """Print data as one JSON object."""
    typer.echo(json.dumps(_plain(data), indent=2, allow_nan=False))


def _plain(value: object) -> Any:  # noqa: ANN401
    """Replace NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def console() -> "Console":
    """The terminal on stdout."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else _REDIRECTED_WIDTH
    return Console(file=sys.stdout, width=wide, highlight=False)


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    right: Iterable[str] = (),
    whole: Iterable[str] = (),
) -> None:
    """Print a table without empty columns; those in ``right`` are aligned right, those in ``whole`` never wrapped."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="bold",
        show_header=any(headers),
    )
    kept = [i for i, column in enumerate(zip(*cells, strict=True)) if any(column)] if cells else range(len(headers))
    for i in kept:
        name = headers[i]
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in whole, overflow="fold")
    for row in cells:
        table.add_row(*(Text(row[i], style=_STYLES.get(row[i], "")) for i in kept))
    console().print(table)


_STYLES = {"integer": "green", "fused": "green", "carried": "cyan", "partly": "yellow", "float": "yellow"}


def print_text(text: str, style: str = "") -> None:
    """Print one line as it is."""
    from rich.text import Text

    console().print(Text(text, style=style), soft_wrap=True)


def write_text(text: str, path: Path | None) -> None:
    """Write text to a file, whole or not at all, or to stdout if there is no path."""
    if path is None:
        typer.echo(text, nl=False)
        return
    from bitwright.files import atomic_write

    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def step(text: str) -> Iterator[None]:
    """Show the current step to people at a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{text} …"):
        yield


def stdout_kept_clean(clean: bool) -> Any:  # noqa: ANN401
    """Redirect all printing to stderr, so that stdout holds only the JSON object."""
    return redirect_stdout(sys.stderr) if clean else nullcontext()
