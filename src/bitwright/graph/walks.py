"""Walks through a graph: back to where values come from, on to what reads them, and all a value depends on."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import fx, nn

from bitwright.graph.facts import facts
from bitwright.nn.operators import Operator, operator_of, operator_of_module

T = TypeVar("T")


def first_input(node: fx.Node) -> fx.Node | None:
    """The tensor that a call computes on: its first argument, or the one named ``input``."""
    given = node.args[0] if node.args else node.kwargs.get("input")
    return given if isinstance(given, fx.Node) else None


def back_through(node: fx.Node, passes: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield a node, the one its values come from, and so on, up to the first that does not pass on its first input."""
    before: fx.Node | None = node
    while before is not None:
        yield before
        before = first_input(before) if passes(before) else None


def value_readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a tensor's values, not just its size."""
    return [user for user in node.users if not facts(user).plain]


def between(earlier: fx.Node, later: fx.Node) -> list[fx.Node]:
    """The nodes from ``later``, included, back to ``earlier``, following first inputs."""
    return [node for node in back_through(later, lambda n: n is not earlier) if node is not earlier]


def operator_called(node: fx.Node, instance: object) -> Operator | None:
    """The operator that a node computes; ``instance`` is the module that it calls, if it calls one."""
    return operator_of_module(instance) if isinstance(instance, nn.Module) else operator_of(node, {})


def moves_values(node: fx.Node, instance: object) -> bool:
    """Whether a call returns only values of its first input."""
    operator = operator_called(node, instance)
    return operator is not None and operator.carries_scale(node, instance if isinstance(instance, nn.Module) else None)


def calls_of_modules(model: fx.GraphModule) -> dict[nn.Module, list[fx.Node]]:
    """The calls of each module that a model's graph calls, by whatever names."""
    calls: dict[nn.Module, list[fx.Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(model.get_submodule(str(node.target)), []).append(node)
    return calls


def needed_for(ends: Iterable[fx.Node], enters: Callable[[fx.Node], bool] = lambda _: True) -> list[fx.Node]:
    """Everything that ``ends`` are computed from, including themselves, each after what it reads.

    The walk does not go past a node that it does not enter.
    """
    found: dict[fx.Node, None] = {}
    waiting = [(node, False) for node in ends]
    while waiting:
        node, inputs_done = waiting.pop()
        if inputs_done:
            found[node] = None
        elif node not in found and enters(node):
            waiting.append((node, True))
            waiting += [(n, False) for n in node.all_input_nodes]
    return list(found)


def reached_from(start: T, step: Callable[[T], Iterable[T]]) -> list[T]:
    """Everything reachable from ``start`` by following ``step``, including ``start``."""
    found, waiting = {start: None}, [start]
    while waiting:
        for node in step(waiting.pop()):
            if node not in found:
                found[node] = None
                waiting.append(node)
    return list(found)
