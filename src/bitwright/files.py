"""Files appear whole or not at all: write beside the target, then rename."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitwright.errors import ConfigError


def check_output(path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
    """Return ``path`` as a Path, or say now why nothing could be written there."""
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"the output {str(target)!r} is a folder; name a file in it")
    if target.exists() and not overwrite:
        raise ConfigError(f"the output {str(target)!r} exists already; choose another name or allow overwriting")
    parent = target.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise ConfigError(f"the output {str(target)!r} cannot be written: {str(parent)!r} is not a folder")
    if not os.access(parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise ConfigError(f"the output {str(target)!r} cannot be written: {str(parent)!r} is read-only")
    return target


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; it takes the name ``path`` only if all went well."""
    target = check_output(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
