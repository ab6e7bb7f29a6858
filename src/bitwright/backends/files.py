"""Where backends come from: a name in the registry, a YAML or JSON file of one's own, or plain data."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bitwright.backends.base import Backend
from bitwright.errors import ConfigError
from bitwright.registry import Registry
from bitwright.validation import mistakes, read_data

BACKENDS: Registry[Backend] = Registry("backend")
_FILES = (".yaml", ".yml", ".json")
_NAMES = [f.name for f in fields(Backend)]  # pyrefly: ignore


def register_backend(*, override: bool = False) -> Callable[[Backend], Backend]:
    """Return a function that files a Backend under its name.

    ::

        MINE = register_backend()(Backend(name="mine", ...))
    """

    def decorate(backend: Backend) -> Backend:
        return BACKENDS.register(backend.name, override=override)(backend)

    return decorate


def find_backend(source: str | Path | Backend) -> Backend:
    """The backend of a name (large and small letters are alike, so are - and _), or in a YAML or JSON file."""
    if isinstance(source, Backend):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(f"backend must be a name or a Backend, not {source!r}")
    if Path(source).suffix.lower() in _FILES:
        return load_backend(source)
    folded = str(source).lower().replace("-", "_")
    exact = next((n for n in BACKENDS.names() if n.lower().replace("-", "_") == folded), str(source))
    return BACKENDS.get(exact)


def load_backend(path: str | Path) -> Backend:
    """Read a backend from a YAML or JSON file; see :func:`parse_backend`."""
    where = f"the backend {str(path)!r}"
    return parse_backend(read_data(Path(path), where), where)


def parse_backend(data: Mapping[str, Any], where: str = "the backend") -> Backend:
    """Read a backend from plain data; all mistakes are named at once.

    Args:
        data: the fields of :class:`Backend`, and ``base``: another backend's name, whose fields serve where none is
            given. Conditions are functions: they come from the base, or from a backend written in Python.
        where: what to call it in messages.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping of settings, not {type(data).__name__}")
    given = dict(data)
    base = given.pop("base", None)
    if base is not None:
        below = find_backend(base)
        given = {name: getattr(below, name) for name in _NAMES} | given
    try:
        return TypeAdapter(Backend).validate_python(given)
    except ValidationError as error:
        raise ConfigError(
            f"{where} has {mistakes(error, lambda path: ['base', *_NAMES] if not path else [])}"
        ) from error
