"""Files appear whole or not at all: write beside the target, then rename.

Until then the data has a temporary name that identifies the writer, so the next writer can remove what killed processes
left behind.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bitwright.errors import ConfigError
from bitwright.signals import DelayedSignals

_LONGEST = 255  # bytes of a name, in every file system that is common
_SHOWN = 200  # letters of a name in a message
_SAID = 500  # letters of another error in a message
_SCRATCH = re.compile(r"\.bitwright-([0-9a-f]{8})-([0-9]{1,19})-[0-9a-f]{8}(\..*)?")
_FORGOTTEN = 7 * 86400.0  # seconds after which leftovers of another machine are removed
# What a disk or file system may do to a correct program; other OS errors are the program's own.
_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
_REFUSALS |= {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.ENXIO}


def check_output(path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
    """Return ``path`` as a Path, or raise now if nothing could be written there."""
    target = Path(path)
    shown = repr(str(target)[:_SHOWN])
    try:
        _check(target, shown, overwrite)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the output {shown} cannot be written: {in_words(error)}") from error
    return target


def _check(target: Path, shown: str, overwrite: bool) -> None:
    if target.is_symlink() and os.path.islink(os.path.realpath(target)):
        raise ConfigError(f"the output {shown} is a link that leads to itself")
    real = _followed(target)
    if any(len(os.fsencode(part)) > _LONGEST for part in real.parts):  # also of folders yet to be created
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    with suppress(FileNotFoundError, NotADirectoryError):
        real.stat()  # raises on invalid names
    if real.exists():
        _check_replaceable(real, shown, overwrite)
    _check_writable(real, shown)


def _check_replaceable(present: Path, shown: str, overwrite: bool) -> None:
    if present.is_dir():
        raise ConfigError(f"the output {shown} is a folder; name a file in it")
    if not present.is_file():
        raise ConfigError(f"the output {shown} is a device, pipe or socket, not a regular file")
    if not overwrite:
        raise ConfigError(f"the output {shown} exists already; choose another name or allow overwriting")


def _check_writable(real: Path, shown: str) -> None:
    parent = real.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise ConfigError(f"the output {shown} cannot be written: {str(parent)!r} is not a folder")
    if not os.access(parent, os.W_OK) or (real.exists() and not os.access(real, os.W_OK)):
        raise ConfigError(f"the output {shown} cannot be written: {str(parent)!r} is read-only")


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, renamed to ``path`` only on success.

    A link is followed, and stays. If the disk refuses, this raises a ConfigError and leaves nothing behind.
    """
    target = _followed(check_output(path))
    folders = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = scratch_path(target.parent, target.suffix[-16:])
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = partial.stat().st_mode  # minus the umask, which can only be read process-wide
        yield partial
        os.chmod(partial, mode & 0o666)
        sync(partial)
        os.replace(partial, target)
        folders = []
        sync(target.parent)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        raise ConfigError(f"the output {str(path)[:_SHOWN]!r} cannot be written: {in_words(error)}") from error
    finally:
        remove(partial, folders)


def remove(path: Path | None, folders: Iterable[Path] = ()) -> None:
    """Remove a file or folder, then folders that are empty; signals wait until it is done."""
    with DelayedSignals():
        if path is not None and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path is not None:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # one that someone else started to use stays
            for folder in folders:
                folder.rmdir()


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that it survives a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def scratch_path(folder: Path, suffix: str = "") -> Path:
    """A name in a folder for incomplete data; leftovers of killed processes there are removed."""
    _clear(folder)
    return folder / f".bitwright-{_machine()}-{os.getpid()}-{secrets.token_hex(4)}{suffix}"


@contextmanager
def scratch_folder(parent: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new folder that is removed afterwards, or by the next process if this one is killed."""
    folder = scratch_path(Path(parent))
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"no files can be made in {str(parent)[:_SHOWN]!r}: {in_words(error)}") from error
    try:
        yield folder
    finally:
        remove(folder)


def _clear(folder: Path) -> None:
    with suppress(OSError):
        names = [entry.name for entry in os.scandir(folder) if entry.name.startswith(".bitwright-")]
        for path in [folder / name for name in names if _left_behind(folder / name)]:
            remove(path)


def _left_behind(path: Path) -> bool:
    """Whether a name is ours and its process is gone or, on another machine, has long been inactive."""
    found = _SCRATCH.fullmatch(path.name)
    if found is None:
        return False
    if found[1] == _machine():
        try:
            os.kill(int(found[2]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:  # it is someone else's
            return False
        return False
    with suppress(OSError):
        return time.time() - path.lstat().st_mtime > _FORGOTTEN
    return False


def _machine() -> str:
    """What process numbers belong to: a machine, or a container on it."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.blake2b(f"{socket.gethostname()} {space}".encode(), digest_size=4).hexdigest()


def _followed(target: Path) -> Path:
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def in_words(error: Exception) -> str:
    """The text of an error, without the path that the operating system adds."""
    return ((error.strerror if isinstance(error, OSError) else None) or str(error))[:_SAID]
