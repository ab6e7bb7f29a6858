"""``bitwright migrate``: scripts for older toolkits, with their imports changed."""

import io
import tokenize
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
    from bitwright.files import atomic_write, check_output

    results = []
    for path in dict.fromkeys(files):
        source, encoding = _read(path)
        results.append((path, source, encoding, migrated(source, str(path))))
        if write:
            check_output(path)
    for path, source, encoding, made in results:
        typer.echo(f"{path}: {len(made.changed)} imports {'changed' if write else 'to change'}")
        for number, statement in made.changed:
            typer.echo(f"  {number}: {statement}")
        for number, what, why in made.missing:
            typer.echo(f"  {number}: {what}: {why}")
        if write and made.text != source:
            mode = path.stat().st_mode
            with atomic_write(path) as part:
                part.write_bytes(made.text.encode(encoding))
            path.chmod(mode)


def _read(path: Path) -> tuple[str, str]:
    """A script and its encoding, which the file says in a comment or a byte-order mark, as Python has it."""
    from bitwright.errors import ConfigError
    from bitwright.files import in_words

    if path.exists() and not path.is_file():
        raise ConfigError(f"{str(path)!r} is not a file: name scripts, as in {str(path / '*.py')!r}")
    if path.suffix == ".ipynb":
        raise ConfigError(f"{str(path)!r} is a notebook: save it as a script first")
    try:
        raw = path.read_bytes()
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        source = raw.decode(encoding)
        if source.encode(encoding) != raw:
            raise ValueError(f"its bytes are not those that {encoding} writes")
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {in_words(error)}") from error
    return source, encoding
