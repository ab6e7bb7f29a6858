"""``bitwright migrate``: scripts for older toolkits, with their imports changed."""

from pathlib import Path
from typing import Annotated

import typer

EPILOG = "Example: bitwright migrate train.py --write"


def migrate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.py…", help="Scripts for an older toolkit.")],
    write: Annotated[
        bool, typer.Option("--write", help="Change the files; without it, only show the changes.")
    ] = False,
) -> None:
    """Change the imports of MQBench, pytorch-quantization, Sparsebit and QuanTransformer, and list what is missing."""
    from bitwright.compat.migrate import migrate as migrated
    from bitwright.errors import ConfigError
    from bitwright.files import atomic_write

    results = []
    for path in files:
        try:
            source = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
        results.append((path, source, migrated(source, str(path))))
    for path, source, made in results:
        typer.echo(f"{path}: {len(made.changed)} imports {'changed' if write else 'to change'}")
        for number, statement in made.changed:
            typer.echo(f"  {number}: {statement}")
        for number, what, why in made.missing:
            typer.echo(f"  {number}: {what} has no equivalent: {why}")
        if write and made.text != source:
            mode = path.stat().st_mode
            with atomic_write(path) as part:
                part.write_bytes(made.text.encode())
            path.chmod(mode)
