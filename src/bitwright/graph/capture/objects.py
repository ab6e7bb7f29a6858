"""Python objects in a graph: constants of any class, and objects with tensors, rebuilt from their parts."""

import dataclasses
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from torch import fx

from bitwright.graph.capture.failures import boundary
from bitwright.graph.facts import facts
from bitwright.graph.walks import back_through


class ConstantObject:
    """A constant of any class, as a function that returns it."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.__name__ = self.__qualname__ = f"the_{type(value).__name__.lower()}"
        self.__module__ = __name__

    def __call__(self) -> Any:
        return self.value


class RebuildObject:
    """Rebuilds an object from its attributes, without calling ``__init__``."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.__name__ = self.__qualname__ = f"new_{kind.__name__.lower()}"
        self.__module__ = __name__

    @boundary
    def __call__(self, state: dict[str, Any], items: Any = None) -> Any:
        made = self.kind.__new__(self.kind)
        if isinstance(made, dict):  # with the base's method, because a class may forbid what it inherits
            base: Any = OrderedDict if isinstance(made, OrderedDict) else dict
            for key, value in items.items():
                base.__setitem__(made, key, value)
        vars(made).update(state)
        return made


def construction_of(item: object) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """How to rebuild an object: a function and its arguments, or None if it needs no rebuilding.

    Dict subclasses are rebuilt by their class, dataclasses from their fields, other objects from their attributes.
    """
    kind, state = type(item), vars_of(item)
    if dataclasses.is_dataclass(item):
        fields = {f.name: f.init for f in dataclasses.fields(item)}
        if all(fields.values()) and fields.keys() >= state.keys():
            return kind, (), {name: getattr(item, name) for name in fields}
    if isinstance(item, dict) and kind is not dict:
        return (RebuildObject(kind), (state, dict(item)), {}) if state else (_BuildDict(kind, item), (dict(item),), {})
    return (RebuildObject(kind), (state,), {}) if state else None


class _BuildDict:
    """Rebuilds a subclass of dict, keeping the default factory of a ``defaultdict``."""

    def __init__(self, kind: type, example: object) -> None:
        self.kind = kind
        self.before = (example.default_factory,) if isinstance(example, defaultdict) else ()
        self.__name__ = self.__qualname__ = f"new_{kind.__name__.lower()}"
        self.__module__ = __name__

    @boundary
    def __call__(self, items: dict[Any, Any]) -> Any:
        return self.kind(*self.before, items)


def vars_of(item: object) -> dict[str, Any]:
    """The attributes of an object, or none."""
    return dict(getattr(item, "__dict__", {}))


def make_results_plain(graph: fx.Graph) -> None:
    """Make a graph return only tensors, in dicts and sequences, and keep none: exporters do not support objects."""
    output = next(iter(reversed(graph.nodes)))
    output.args = (_plain(output.args[0]),)
    for node in reversed(graph.nodes):
        if not node.users and (_makes_object(node) or isinstance(node.target, ConstantObject) or _remembers(node)):
            graph.erase_node(node)


def _plain(item: object) -> Any:
    if isinstance(item, fx.Node) and _makes_object(item):
        item = _fields(item)
    if isinstance(item, dict):
        return {name: _plain(value) for name, value in item.items() if _is_result(value)}
    return [_plain(each) for each in item if _is_result(each)] if isinstance(item, tuple | list) else item


def _fields(node: fx.Node) -> dict[str, Any]:
    """What the object that a node makes holds, by name."""
    parts: list[Any] = [part for part in (*node.args, node.kwargs) if part is not None]
    return {name: value for part in parts for name, value in part.items()}


def _is_result(item: object) -> bool:
    """Whether it may contain tensors."""
    if isinstance(item, fx.Node):
        return _makes_object(item) or not facts(item).plain
    return isinstance(item, tuple | list | dict)


def _remembers(node: fx.Node) -> bool:
    """Whether a node only puts something into a container that the model holds, or reads that."""
    *_, source = back_through(node, lambda _: True)
    return source.op == "get_attr" and facts(source).tensor is None and facts(source).written


def _makes_object(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    dataclass = inspect.isclass(node.target) and dataclasses.is_dataclass(node.target)
    return dataclass or isinstance(node.target, RebuildObject | _BuildDict)
