"""Channel shuffles between a layer and a norm: found by sending channel numbers through the nodes between them."""

import operator
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.facts import facts, shape_of
from bitwright.nn.operators import operator_of

_MOVES = {"reshape", "transpose", "permute", "flatten", "unflatten", "contiguous", "channel_shuffle", "identity"}
_SIZES = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, int}


def before_moves(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node:
    """Go back from a tensor over nodes that only move values, each read by one other, to where the values come from."""
    while _only_moves(node, modules) and isinstance(node.args[0] if node.args else None, fx.Node):
        node = node.args[0]  # pyrefly: ignore
    return node


def channel_order(layer: fx.Node, norm: fx.Node, modules: dict[str, nn.Module]) -> list[int] | None:
    """Which channel of ``layer`` each channel of what goes into ``norm`` is; None where more than that happens.

    The nodes between the two only move values, as :func:`before_moves` finds. They are tried with two batch sizes.
    """
    chain: list[fx.Node] = []
    node: Any = norm.args[0] if norm.args else norm.kwargs["input"]
    while node is not layer:
        chain.insert(0, node)
        node = node.args[0]
    shape = shape_of(layer)
    if shape is None or len(shape) < 3 or shape_of(chain[-1]) != shape or _readers(layer) != 1:
        return None
    first, second = (_order_at(layer, chain, (batch, *shape[1:]), modules) for batch in (2, 3))
    plain = list(range(shape[1]))  # no shuffle, but other axes may have moved, and memory with them
    return first if first == second != plain else None


def _only_moves(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    kind = operator_of(node, modules)
    return kind is not None and kind.name in _MOVES and not facts(node).written and _readers(node) == 1


def _readers(node: fx.Node) -> int:
    """How many read the values of a tensor, not only its size."""
    return len([user for user in node.users if not facts(user).plain])


def _order_at(
    layer: fx.Node, chain: list[fx.Node], shape: tuple[int, ...], modules: dict[str, nn.Module]
) -> list[int] | None:
    numbers = torch.arange(shape[1]).reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape).contiguous()
    values: dict[fx.Node, Any] = {layer: numbers}
    try:
        for node in chain:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _evaluate(n, values))
            values[node] = _call(node, modules, args, kwargs)
    except (RuntimeError, ValueError, LookupError, TypeError):
        return None
    moved = values[chain[-1]]
    if tuple(moved.shape) != shape:
        return None
    order = moved.select(0, 0).flatten(1)[:, 0]
    expected = order.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape)
    return order.tolist() if torch.equal(moved, expected) and sorted(order.tolist()) == list(range(shape[1])) else None


def _call(node: fx.Node, modules: dict[str, nn.Module], args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        return modules[str(node.target)](*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # pyrefly: ignore


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """A tensor of the chain, or a size that comes of the layer's result."""
    if node not in values:
        source = node.args[0] if node.args else None
        if node.op == "call_method" and node.target == "size":
            values[node] = _evaluate(source, values).size(*node.args[1:])  # pyrefly: ignore
        elif node.op == "call_function" and node.target is getattr and node.args[1] == "shape":
            values[node] = _evaluate(source, values).shape  # pyrefly: ignore
        elif node.op == "call_function" and node.target in _SIZES | {operator.getitem}:
            args = fx.node.map_arg(node.args, lambda n: _evaluate(n, values))
            values[node] = node.target(*args)  # pyrefly: ignore
        else:
            raise LookupError(f"the value of {node.name} is not known")
    return values[node]
