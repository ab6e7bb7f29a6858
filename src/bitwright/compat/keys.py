"""Keys of a dialect: refuse all unknown ones at once, with the nearest existing ones."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.validation import mistakes, shown, within_limits

_MOST = 10  # mistakes in one message


@contextmanager
def translating(where: str, given: object) -> Iterator[None]:
    """Inside, refuse configs that are too deep or too large, or that no recipe can express."""
    try:
        within_limits(given)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"{where} makes a recipe with {mistakes(error, lambda _: [])}") from error


def section(where: str, given: object, known: Iterable[str] | None = None) -> Mapping[Any, Any]:
    """``given`` as a mapping (None is an empty one), with only ``known`` keys, if these are given."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a mapping of settings, not {shown(given)}")
    if known is not None:
        refuse_unknown(where, given, list(known))
    return given


def refuse_unknown(where: str, given: Iterable[Any], known: list[str]) -> None:
    """Refuse unknown keys, naming the first few."""
    lost = [key for key in given if key not in known]
    if lost:
        words = [f"{where} has no key {shown(key)}{suggest(str(key), known)}" for key in lost[:_MOST]]
        raise ConfigError("; ".join([*words, *([f"and {len(lost) - _MOST} more"] if len(lost) > _MOST else [])]))


def check_names(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse all names that no module of the model has, at once."""
    names = [name for name in known if name]
    lost = [f"the model has no module {name!r}{suggest(str(name), names)}" for name in given if name not in names]
    if lost:
        raise UnknownNameError(f"{where}: " + "; ".join(lost))


def flag(where: str, given: object) -> bool:
    """A setting that is True or False."""
    if not isinstance(given, bool):
        raise ConfigError(f"{where} must be True or False, not {shown(given)}")
    return given


def number(where: str, given: object) -> float:
    """A finite number, not text."""
    limit = sys.float_info.max
    if isinstance(given, bool) or not isinstance(given, int | float) or not -limit <= given <= limit:
        raise ConfigError(f"{where} must be a number, not {shown(given)}")
    return float(given)


def items(where: str, given: object) -> list[Any]:
    """A list or tuple as a list; a single thing, as ``(torch.nn.Upsample)`` is, as a list of one."""
    if isinstance(given, Mapping) or given is None:
        raise ConfigError(f"{where} must be a list, not {shown(given)}")
    return list(given) if isinstance(given, list | tuple | set | frozenset) else [given]
