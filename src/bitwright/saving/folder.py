"""Folders appear whole or not at all: they are written beside the target and then swapped in."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from bitwright.errors import SaveError
from bitwright.files import in_words, remove, scratch_path, sync

_AT_FDCWD, _EXCHANGE = -100, 2  # of Linux's renameat2


def check_folder(path: str | os.PathLike[str], ours: Collection[str], mark: str) -> Path:
    """Return where a folder goes, following links, or raise if it cannot; only our own folders are ever replaced.

    ``ours`` are the files that such a folder may have, ``mark`` the one that every such folder has.
    """
    shown = repr(str(path)[:200])
    try:
        target = Path(os.path.realpath(path))
        held = sorted(os.listdir(target)) if target.is_dir() else []
        exists = os.path.lexists(target)
    except (OSError, ValueError, TypeError) as error:
        raise SaveError(f"the folder {shown} cannot be written: {in_words(error)}") from error
    if exists and not target.is_dir():
        raise SaveError(f"the folder {shown} cannot be written: something else has that name")
    foreign = [name for name in held if name not in ours]
    if foreign:
        raise SaveError(
            f"the folder {shown} has {foreign[0]!r}, which Bitwright did not write: choose another folder, or empty it"
        )
    if held and mark not in held:
        raise SaveError(f"the folder {shown} exists and is not a saved model: choose another folder, or empty it")
    return target


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target``, renamed to ``target`` only on success."""
    made: list[Path] = []
    partial = None
    try:
        made = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = scratch_path(target.parent)
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            sync(file)
        _put(partial, target)
        made = []
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise SaveError(f"the folder {str(target)[:200]!r} cannot be written: {in_words(error)}") from error
    finally:
        remove(partial, made)  # what is left of it, or the folder that it has replaced


def _put(partial: Path, target: Path) -> None:
    """Rename a folder; an existing one swaps names with it, atomically where supported."""
    try:
        os.rename(partial, target)
        return
    except OSError as error:  # it may be there, or another process may just have made it
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
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
    remove(old)
