"""What a node does besides giving a value: whether it writes into its input, and whether it can be left out."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.graph.capture.guards import is_guard
from bitwright.graph.capture.proxy import IN_PLACE_OPERATORS, set_item
from bitwright.graph.capture.tracer import store
from bitwright.graph.match.find import is_in_graph

WRITERS = {*IN_PLACE_OPERATORS, set_item}
# Functions from here have no effect but their value, as far as they do not write.
_HOMES = ("torch", "_operator", "operator", "math", "builtins", "bitwright")
_EFFECTS = (print, input, open, setattr, delattr, store)


def writes(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node writes into its input."""
    if node.op == "call_module":
        return getattr(model.get_submodule(str(node.target)), "inplace", False) is True
    if node.op == "call_method":
        return ends_in_one_underscore(str(node.target))
    if node.op != "call_function":
        return False
    return node.target in WRITERS or twin(node.target) is not None or inplace_argument(node) is not None


def twin(function: Any) -> Callable[..., Any] | None:
    """``torch.relu`` for ``torch.relu_``."""
    name = getattr(function, "__name__", "")
    if not ends_in_one_underscore(name):
        return None
    for home in (F, torch):
        if getattr(home, name, None) is function:
            return getattr(home, name[:-1], None)
    return None


def inplace_argument(node: fx.Node) -> str | int | None:
    """The keyword or position by which a function is told to work in place, if it is."""
    if node.kwargs.get("inplace") is True:
        return "inplace"
    if getattr(node.target, "__module__", None) != "torch.nn.functional" or not callable(node.target):
        return None
    position = _inplace_position(node.target)
    return position if position is not None and node.args[position : position + 1] == (True,) else None


@functools.cache
def _inplace_position(function: Callable[..., Any]) -> int | None:
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def ends_in_one_underscore(name: str) -> bool:
    """Whether a name is that of an operation in place."""
    return name.endswith("_") and not name.endswith("__")


def has_effect(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node is known to do more than give a value, or is where values come in or go out."""
    if node.op in ("placeholder", "output") or node.kwargs.get("out") is not None or is_guard(node):
        return True
    return node.target in _EFFECTS or writes(node, model)


def is_pure(node: fx.Node, model: nn.Module) -> bool:
    """Whether it is certain that nobody would notice if a node without users were not there."""
    if has_effect(node, model):
        return False
    if node.op == "call_module":
        return _is_from(type(model.get_submodule(str(node.target))), ("torch.nn", "bitwright"))
    return node.op != "call_function" or _is_from(node.target, _HOMES)


def remove_unused(model: fx.GraphModule, nodes: Iterable[fx.Node], *, replaced: Iterable[fx.Node] = ()) -> None:
    """Erase those of ``nodes`` that nobody reads and nobody would miss, then those that only they read, and so on.

    Those ``replaced`` have something else in their place, so only a known effect keeps them.
    """
    known, waiting = set(replaced), list(nodes)
    while waiting:
        node = waiting.pop()
        if not is_in_graph(node) or node.users:
            continue
        if is_pure(node, model) or (node in known and not has_effect(node, model)):
            before = node.all_input_nodes
            model.graph.erase_node(node)
            waiting += before


def _is_from(thing: Any, homes: tuple[str, ...]) -> bool:
    home = getattr(thing, "__module__", None) or type(thing).__module__
    return any(home == h or home.startswith(h + ".") for h in homes)
