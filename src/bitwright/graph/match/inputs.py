"""The inputs of a node: every node among its arguments, in the order of the signature, as often as it occurs."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.operator_schemas import get_signature_for_torch_op


def inputs_of(node: fx.Node, instance: Any) -> tuple[fx.Node, ...]:
    """The inputs of ``node``; the signature of ``instance``, which it calls, orders keyword arguments."""
    named = {name: found for name, value in node.kwargs.items() if (found := tuple(_nodes_in(value)))}
    if len(named) > 1:
        names = _parameters(node, instance, frozenset(node.kwargs))
        named = {**{n: named[n] for n in names if n in named}, **named}
    return (*_nodes_in(node.args), *(n for found in named.values() for n in found))


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _nodes_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _nodes_in(item)
    elif isinstance(value, slice):
        yield from _nodes_in((value.start, value.stop, value.step))


def _parameters(node: fx.Node, instance: Any, given: frozenset[str]) -> tuple[str, ...]:
    """The names of a call's parameters in order, of the overload that fits; none if that cannot be determined."""
    if isinstance(instance, nn.Module):
        return _of_python(type(instance).forward)
    if node.op == "call_method":
        instance = getattr(torch, str(node.target), None)
    return _of_function(instance, given) if callable(instance) else ()


def _of_python(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


@functools.cache
def _of_function(function: Callable[..., Any], given: frozenset[str]) -> tuple[str, ...]:
    for signature in get_signature_for_torch_op(function) or ():
        if given <= set(signature.parameters):
            return tuple(signature.parameters)
    return _of_python(function)


class CallView:
    """A function that looks like a module to a checker: arguments of the call are attributes.

    ``lambda concat_node, module: module.dim == 1`` holds for ``torch.cat([a, b], 1)`` as it does for a module.
    """

    def __init__(self, node: fx.Node, function: Any) -> None:
        self.node, self.function = node, function

    def __getattr__(self, name: str) -> Any:
        node = self.node
        if name in node.kwargs:
            return node.kwargs[name]
        function = getattr(torch, str(node.target), self.function) if node.op == "call_method" else self.function
        for signature in get_signature_for_torch_op(function) or [inspect.signature(function)]:
            names = list(signature.parameters)
            if name in names:
                place, default = names.index(name), signature.parameters[name].default
                return node.args[place] if place < len(node.args) else default
        raise AttributeError(f"the call {node.name} of {self.function!r} has no argument {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)
