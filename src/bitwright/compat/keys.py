"""Keys of a dialect: what is unknown is refused, all of it at once, with the nearest that exist."""

from collections.abc import Iterable, Mapping
from typing import Any

from bitwright.errors import ConfigError, UnknownNameError, suggest


def section(where: str, given: Any, known: Iterable[str] | None = None) -> Mapping[Any, Any]:
    """``given`` as a mapping (None is an empty one) all of whose keys are ``known``, if that is given."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a mapping of settings, not {given!r}")
    names = list(given if known is None else known)
    lost = [f"{where} has no key {key!r}{suggest(str(key), names)}" for key in given if key not in names]
    if lost:
        raise ConfigError("; ".join(lost))
    return given


def check_names(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that no module of the model has, all of them at once."""
    names = [name for name in known if name]
    lost = [f"the model has no module {name!r}{suggest(str(name), names)}" for name in given if name not in names]
    if lost:
        raise UnknownNameError(f"{where}: " + "; ".join(lost))


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
