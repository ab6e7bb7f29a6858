"""Python objects in a graph: constants of any class, and results that are objects holding tensors."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Held:
    """A constant of any class, as a function that returns it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.__name__ = self.__qualname__ = f"the_{type(value).__name__.lower()}"
        self.__module__ = __name__

    def __call__(self) -> Any:
        """Return the constant."""
        return self.value


class Rebuilt:
    """Makes an object of a class again from its attributes, without its ``__init__``."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.__name__ = self.__qualname__ = f"new_{kind.__name__.lower()}"
        self.__module__ = __name__

    def __call__(self, state: dict[str, Any], items: Any = None) -> Any:
        """Make the object."""
        made = self.kind.__new__(self.kind)
        if isinstance(made, dict):
            dict.update(made, items)
        vars(made).update(state)
        return made


def parts_of(item: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """How to make an object again: a function and its arguments; None for what needs no making.

    Subclasses of dict are made by their class, dataclasses by their fields, other objects from their attributes.
    """
    kind = type(item)
    if dataclasses.is_dataclass(item):
        fields = [f.name for f in dataclasses.fields(item)]
        if all(f.init for f in dataclasses.fields(item)) and set(fields) >= vars(item).keys():
            return kind, (), {name: getattr(item, name) for name in fields}
    if isinstance(item, dict) and kind is not dict:
        if not vars_of(item):
            return _DictOf(kind, item), (dict(item),), {}
        return Rebuilt(kind), (vars_of(item), dict(item)), {}
    state = vars_of(item)
    return (Rebuilt(kind), (state,), {}) if state else None


class _DictOf:
    """Makes a subclass of dict, keeping what a ``defaultdict`` gives for keys it lacks."""

    def __init__(self, kind: type, example: Any) -> None:
        self.kind = kind
        self.before = (example.default_factory,) if isinstance(example, defaultdict) else ()
        self.__name__ = self.__qualname__ = f"new_{kind.__name__.lower()}"
        self.__module__ = __name__

    def __call__(self, items: dict[Any, Any]) -> Any:
        return self.kind(*self.before, items)


def vars_of(item: Any) -> dict[str, Any]:
    """The attributes of an object, or none."""
    return dict(getattr(item, "__dict__", {}))
