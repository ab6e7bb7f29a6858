"""Progress of long jobs: one file per job, replaced as a whole."""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
    """The progress of one job; several jobs may share a folder.

    ``identity`` has digests of what the progress depends on, by readable name: ``{"model": "3f…"}``.
    """

    def __init__(self, folder: str | os.PathLike[str], job: str, identity: Mapping[str, str]) -> None:
        self._identity = {"format": _FORMAT, "job": job, **identity}
        self._written = time.monotonic()
        try:
            self.path = Path(folder) / f"{job}.safetensors"
            if Path(folder).exists() and not Path(folder).is_dir():
                raise SaveError(f"the checkpoint {str(folder)[:200]!r} is not a folder")
            check_output(self.path)
        except (OSError, ValueError, TypeError) as error:
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
            raise SaveError(f"{self._where} cannot be written: {error}") from error
        self._written = time.monotonic()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn any error inside into one that names this checkpoint."""
        try:
            yield
        except SaveError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise SaveError(f"{self._where} does not fit the job ({text:.300}); remove it to start over") from error

    @property
    def _where(self) -> str:
        return f"the checkpoint {str(self.path)!r}"

    def read(self) -> Saved | None:
        """What is stored, if anything; raises if it belongs to something else."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                text = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
            if digest_of([text["identity"], text["data"], tensors]) != text["digest"]:
                raise ValueError("it was changed or damaged after it was written")
            identity, data = json.loads(text["identity"]), json.loads(text["data"])
        except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
            raise SaveError(f"{self._where} cannot be read ({error}); remove it to start over") from error
        other = [name for name, value in self._identity.items() if identity.get(name) != value]
        if other:
            raise SaveError(f"{self._where} belongs to another {' and another '.join(other)}; remove it to start over")
        return Saved(tensors, data)


def digest_of(value: object) -> str:
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
