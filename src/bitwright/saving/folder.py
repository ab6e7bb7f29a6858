"""Folders appear whole or not at all: they are written beside the target and take its place at once."""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from bitwright.errors import SaveError
from bitwright.files import scratch_path

_AT_FDCWD, _EXCHANGE = -100, 2  # of Linux's renameat2


def check_folder(path: str | os.PathLike[str], ours: Collection[str], mark: str) -> Path:
    """Return where a folder goes, links followed, or say why it cannot: only an own folder is ever replaced.

    Args:
        path: the folder.
        ours: the files that such a folder may have.
        mark: the file that every such folder has.
    """
    try:
        target = Path(os.path.realpath(path))
        held = sorted(os.listdir(target)) if target.is_dir() else []
        exists = os.path.lexists(target)
    except (OSError, ValueError, TypeError) as error:
        raise SaveError(f"the folder {str(path)[:200]!r} cannot be written: {error}") from error
    if exists and not target.is_dir():
        raise SaveError(f"the folder {str(path)!r} cannot be written: there is something else of that name")
    foreign = [name for name in held if name not in ours]
    if foreign:
        raise SaveError(f"the folder {str(path)!r} has {foreign[0]!r}, which is not ours: choose another, or empty it")
    if held and mark not in held:
        raise SaveError(f"the folder {str(path)!r} exists and is not a saved model: choose another, or empty it")
    return target


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; it takes the name ``target`` only if all went well."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = scratch_path(target.parent)
        partial.mkdir(mode=0o700)
    except OSError as error:
        raise SaveError(f"the folder {str(target)[:200]!r} cannot be written: {error.strerror}") from error
    try:
        yield partial
        for file in partial.iterdir():
            _sync(file)
        os.chmod(partial, 0o777 & ~_umask())
        _put(partial, target)
        _sync(target.parent)
    except OSError as error:
        raise SaveError(f"the folder {str(target)!r} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # what is left of it, or the folder that it has replaced


def _put(partial: Path, target: Path) -> None:
    """Give a folder its name; one that has the name already gets the other's, in the same moment where that works."""
    if not target.exists():
        os.rename(partial, target)
        return
    with contextlib.suppress(OSError, AttributeError):
        exchange = ctypes.CDLL(None, use_errno=True).renameat2
        if exchange(_AT_FDCWD, os.fsencode(partial), _AT_FDCWD, os.fsencode(target), _EXCHANGE) == 0:
            return
    old = scratch_path(target.parent)
    os.rename(target, old)
    try:
        os.rename(partial, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
