"""Progress of long jobs: one file per job, replaced as a whole, and signals that wait until it is written."""

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bitwright.errors import ConfigError, SaveError
from bitwright.files import atomic_write, check_output, in_words

_FORMAT = "1"
_EVERY = 60.0  # seconds between two writes, at least


class Saved(NamedTuple):
    """The contents of a checkpoint: tensors by name, and plain data."""

    tensors: dict[str, Tensor]
    data: dict[str, Any]


class Checkpoint:
    """The progress of one job.

    Args:
        folder: where its file is; several jobs may share a folder.
        job: the name of the job, and of its file.
        identity: digests of what the progress depends on, by readable name: ``{"model": "3f…"}``.
    """

    def __init__(self, folder: str | os.PathLike[str], job: str, identity: Mapping[str, str]) -> None:
        self.path = Path(folder) / f"{job}.safetensors"
        self._identity = {"format": _FORMAT, "job": job, **identity}
        self._written = time.monotonic()
        try:
            if Path(folder).exists() and not Path(folder).is_dir():
                raise SaveError(f"the checkpoint {str(folder)[:200]!r} is not a folder")
            check_output(self.path)
        except (OSError, ValueError, ConfigError) as error:
            raise SaveError(f"the checkpoint {str(folder)[:200]!r} cannot be used: {in_words(error)}") from error

    @property
    def due(self) -> bool:
        """Whether the last write is long enough ago."""
        return time.monotonic() - self._written >= _EVERY

    def write(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Replace what is stored; a process killed meanwhile leaves the old state."""
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
        text = {"identity": json.dumps(self._identity), "data": json.dumps(dict(data))}
        text["digest"] = digest_of([text["identity"], text["data"], plain])
        try:
            with atomic_write(self.path) as partial:
                save_file(plain, partial, text)
        except (OSError, ConfigError, SafetensorError) as error:
            raise SaveError(f"the progress of the {self._identity['job']} cannot be saved: {error}") from error
        self._written = time.monotonic()

    def read(self) -> Saved | None:
        """What is stored, if anything; raises if it belongs to something else."""
        if not self.path.exists():
            return None
        where = f"the checkpoint {str(self.path)!r}"
        try:
            with safe_open(self.path, "pt") as file:
                text = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
            if digest_of([text["identity"], text["data"], tensors]) != text["digest"]:
                raise ValueError("it was changed or damaged after it was written")
            identity, data = json.loads(text["identity"]), json.loads(text["data"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise SaveError(f"{where} cannot be read ({error}); remove it to start over") from error
        other = [name for name, value in self._identity.items() if identity.get(name) != value]
        if other:
            raise SaveError(f"{where} belongs to another {' and another '.join(other)}; remove it to start over")
        return Saved(tensors, data)


class DelayedSignals:
    """Defers SIGINT and SIGTERM until :meth:`deliver` is called; a second signal takes effect at once.

    Outside the main thread, where Python has no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.noted: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._restore()
        if kind is None:
            self.deliver()

    def deliver(self) -> None:
        """Deliver a deferred signal, if there is one."""
        number, self.noted = self.noted, None
        if number is not None:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        again = self.noted is not None
        self.noted = number
        if again:
            self.deliver()


def digest_of(value: Any) -> str:  # noqa: ANN401
    """A digest of tensors, and of plain values and containers of these."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:  # noqa: ANN401
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        digest.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(f"{key!r}:".encode())
            _add(digest, item)
    elif isinstance(value, tuple | list):
        digest.update(f"{len(value)}[".encode())
        for item in value:
            _add(digest, item)
    else:
        plain = isinstance(value, bool | int | float | str | bytes | None)
        digest.update((repr(value) if plain else type(value).__qualname__).encode())
