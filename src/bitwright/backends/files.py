"""Where backends come from: a name in the registry, a YAML or JSON file, or plain data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.backends.base import Backend, merged, validated
from bitwright.errors import ConfigError
from bitwright.registry import Registry
from bitwright.validation import read_data, shown

BACKENDS: Registry[Backend] = Registry("backend")
_FILES = (".yaml", ".yml", ".json")


def register_backend(backend: Backend, *, override: bool = False) -> Backend:
    """Add a backend under its name.

    ::

        MINE = register_backend(Backend(name="mine", title="my accelerator", ...))
    """
    if not isinstance(backend, Backend):
        raise ConfigError(f"register_backend needs a Backend, not {shown(backend)}: find_backend(…) reads plain data")
    return BACKENDS.register(backend.name, override=override)(backend)


def find_backend(source: Mapping[str, Any] | str | Path | Backend) -> Backend:
    """Find a backend by name (ignoring case, - and _), or read one; all mistakes are reported at once.

    Args:
        source: a name, the path of a YAML or JSON file, or plain data: the fields of :class:`Backend`, and ``base``,
            another backend's name, whose settings are the defaults. Conditions are functions, so they come from the
            base, or from a backend written in Python.
    """
    if isinstance(source, Mapping):
        return _parse(source, "the backend")
    if isinstance(source, Backend):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(f"backend must be a name or a Backend, not {shown(source)}")
    if Path(source).suffix.lower() in _FILES:
        return load_backend(source)
    folded = str(source).lower().replace("-", "_")
    exact = next((n for n in BACKENDS if n.lower().replace("-", "_") == folded), str(source))
    return BACKENDS.get(exact)


def load_backend(path: str | Path) -> Backend:
    """Read a backend from a YAML or JSON file; see :func:`find_backend`."""
    where = f"the backend {str(path)!r}"
    return _parse(read_data(Path(path), where), where)


def _parse(data: object, where: str) -> Backend:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping of settings, not {type(data).__name__}")
    given = {str(key): value for key, value in data.items()}
    base = given.pop("base", None)
    return validated(given if base is None else merged(find_backend(base), given), where)
