"""Keys of a dialect: what is unknown is refused, all of it at once, with the nearest that exist."""

from collections.abc import Iterable, Mapping
from typing import Any

from bitwright.errors import ConfigError, suggest


def section(where: str, given: Any, known: Iterable[str]) -> Mapping[str, Any]:
    """``given`` as a mapping (None is an empty one) all of whose keys are ``known``."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a mapping of settings, not {given!r}")
    names = list(known)
    lost = [f"{where} has no key {key!r}{suggest(str(key), names)}" for key in given if key not in names]
    if lost:
        raise ConfigError("; ".join(lost))
    return given


def flag(where: str, given: Any) -> bool:
    """A setting that is True or False."""
    if not isinstance(given, bool):
        raise ConfigError(f"{where} is True or False, not {given!r}")
    return given


def items(where: str, given: Any) -> list[Any]:
    """A list or tuple as a list; a single thing, as ``(torch.nn.Upsample)`` is, as a list of one."""
    if isinstance(given, Mapping) or given is None:
        raise ConfigError(f"{where} must be a list, not {given!r}")
    return list(given) if isinstance(given, list | tuple | set | frozenset) else [given]
