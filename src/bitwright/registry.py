"""A registry you can list, filter and mistype: one per kind of plug-in."""

import importlib
import inspect
import logging
import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from importlib import metadata
from typing import Generic, TypeVar

from bitwright.errors import ConfigError, UnknownNameError, nearest, suggest

T = TypeVar("T")
_log = logging.getLogger(__name__)
ENTRY_POINT_GROUP = "bitwright.plugins"


class _Waiting(threading.local):
    """Whether this thread is importing one of our packages; plug-ins may need it, so they wait until it is complete."""

    importing = False


_waiting = _Waiting()


class Registry(Generic[T]):
    """Names for things of one kind; a duplicate is an error, an unknown name a suggestion.

    Another distribution adds to it by declaring an entry point in the group ``bitwright.plugins``
    that names a module; importing that module runs its decorators.
    """

    _plugins_loaded = False

    def __init__(self, kind: str, check: Callable[[T], None] | None = None) -> None:
        self.kind, self._check = kind, check
        self._items: dict[str, T] = {}
        self._aliases: dict[str, str] = {}

    def register(self, name: str, *, aliases: tuple[str, ...] = (), override: bool = False) -> Callable[[T], T]:
        """Return a decorator that files what it decorates under ``name`` and its ``aliases``."""
        aliases = (aliases,) if isinstance(aliases, str) else aliases
        for key in (name, *aliases):
            if not isinstance(key, str) or not key:
                raise ConfigError(f"name the {self.kind} that you register, as in ('Mine'); {key!r} is no name")

        def decorate(item: T) -> T:
            if self._check is not None:
                self._check(item)
            for key in (name, *aliases):
                taken = self._items.get(self._aliases.get(key, key))
                if taken is not None and not override:
                    raise ConfigError(
                        f"{self.kind} {key!r} is registered twice: by {describe(taken)} and by {describe(item)}; "
                        "choose another name or pass override=True"
                    )
            self._items[name] = item
            self._aliases.pop(name, None)
            self._aliases.update(dict.fromkeys(aliases, name))
            return item

        return decorate

    def unregister(self, name: str) -> None:
        """Remove ``name`` and its aliases."""
        self.get(name)
        target = self._aliases.get(name, name)
        del self._items[target]
        self._aliases = {a: n for a, n in self._aliases.items() if n != target}

    def get(self, name: str) -> T:
        """Return what ``name`` stands for, or raise with the nearest names."""
        if not isinstance(name, str):
            raise ConfigError(f"a {self.kind} must be chosen by its name (a str), not {name!r}")
        for _ in range(2):
            item = self._items.get(self._aliases.get(name, name))
            if item is not None:
                return item
            load_plugins()
        known = [*self._items] if nearest(name, self._items) else [*self._items, *self._aliases]
        raise UnknownNameError(f"unknown {self.kind} {name!r}{suggest(name, known)}")

    def names(self, pattern: str = "*") -> list[str]:
        """List the names (not the aliases) that match a glob."""
        load_plugins()
        known = sorted(self._items)
        return known if pattern == "*" else [name for name in known if fnmatch(name, pattern)]

    def values(self) -> list[T]:
        """List what is registered, in the order of the names."""
        return [self._items[name] for name in self.names()]

    def aliases(self) -> list[str]:
        """List the other names."""
        load_plugins()
        return sorted(self._aliases)

    def __contains__(self, name: str) -> bool:
        return name in self._items or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def check_class(cls: object, base: type, calls: Mapping[str, tuple[str, ...]], page: str) -> None:
    """Refuse what cannot be called as its kind is called.

    Args:
        cls: what is registered.
        base: the class that it must derive from.
        calls: the arguments, in order, that its methods are given.
        page: what tells how to write one.
    """
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise ConfigError(f"{describe(cls)} must be a class derived from {base.__name__}: see {page}")
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"{describe(cls)} does not define {' and '.join(missing)}: see {page}")
    for name, arguments in calls.items():
        try:
            inspect.signature(getattr(cls, name)).bind("self", *arguments)
        except TypeError as error:
            given = ", ".join(arguments) or "no arguments"
            rest = "; other arguments need defaults" if name == "__init__" else ""
            raise ConfigError(f"{cls.__name__}.{name} must take {given} ({error}){rest}: see {page}") from error


def import_all(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, whose decorators register what it holds."""
    before, _waiting.importing = _waiting.importing, True
    try:
        for module in pkgutil.iter_modules(path):
            importlib.import_module(f"{package}.{module.name}")
    finally:
        _waiting.importing = before


def load_plugins() -> None:
    """Import, once, every module that other distributions offer as a plug-in."""
    if Registry._plugins_loaded or _waiting.importing:
        return
    Registry._plugins_loaded = True
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except Exception:
            _log.exception("the plug-in %r could not be loaded and is left out", entry.name)


def describe(item: object) -> str:
    """Say where a class or function lives, or show anything else."""
    named = item if hasattr(item, "__qualname__") or isinstance(item, str | int) else type(item)
    name, module = getattr(named, "__qualname__", None) or repr(item), getattr(named, "__module__", None)
    return f"{module}.{name}" if module else name
