"""Known sizes: which dimensions of a tensor no input can change, and the results of size arithmetic."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.expression import is_constant
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.walks import first_input
from bitwright.nn.operators import Operator, operator_of
from bitwright.nn.operators.base import argument

Known = tuple[int | None, ...]  # a size for each dimension; None where it may change with the input
_ARITHMETIC = {
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv, operator.neg),
    *(operator.getitem, int, math.prod, max, min),
}
_RESHAPES = {"reshape", "view", torch.reshape}
_PERMUTES = {"permute", torch.permute}
_MOVES = _PERMUTES | {"transpose", torch.transpose, "swapaxes", torch.swapaxes}


class Sizes:
    """Works out the sizes in one graph, each node once."""

    def __init__(self, graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._known: dict[fx.Node, Known] = {}
        self._numbers: dict[fx.Node, Any] = {}  # tuples of sizes may have None in them
        for node in graph.nodes:
            shape = shape_of(node)
            if shape is not None:
                found = self._of_tensor(node, shape)
                self._known[node] = found if found is not None and len(found) == len(shape) else (None,) * len(shape)
            elif facts(node).plain:
                self._numbers[node] = self._of_number(node)

    def of(self, node: fx.Node) -> Known:
        """The sizes of a tensor that are the same for all inputs."""
        return self._known.get(node, ())

    def number(self, node: fx.Node) -> Any:
        """The result of size arithmetic if it is the same for all inputs, else None."""
        found = self._numbers.get(node)
        return found if isinstance(found, int | float) else None

    def _of_tensor(self, node: fx.Node, shape: tuple[int, ...]) -> Known | None:
        kind, source = operator_of(node, self._modules), first_input(node)
        if node.op == "get_attr":
            return shape
        if kind is not None and kind.name == "cat":
            return self._concatenated(node, len(shape))
        if kind is None or source is None:
            return None
        if kind.same_shape or kind.activation:
            return self.of(source)
        if kind.binary and kind.elementwise:
            return self._broadcast(node, shape)
        if kind.weight:
            return self._after_layer(node, kind, shape)
        rule = _RULES.get(kind.name)
        return None if rule is None else rule(self, node, self.of(source))

    def _broadcast(self, node: fx.Node, shape: tuple[int, ...]) -> Known:
        tensors = [self.of(a) for a in node.args if isinstance(a, fx.Node) and a in self._known]
        sizes = [_joined([t[-d] for t in tensors if len(t) >= d]) for d in range(1, len(shape) + 1)]
        return tuple(reversed(sizes))

    def _after_layer(self, node: fx.Node, kind: Operator, shape: tuple[int, ...]) -> Known | None:
        weight = node.kwargs.get("weight", node.args[1] if len(node.args) > 1 else None)
        if node.op != "call_module" and not is_constant(weight):
            return None
        axis = len(shape) + kind.channel_axis
        return tuple(size if d == axis else None for d, size in enumerate(shape))

    def _reshaped(self, node: fx.Node, _: Known) -> Known | None:
        if node.target not in _RESHAPES:
            return None
        sizes: Any = node.args[1:]
        sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
        numbers = [self.number(size) if isinstance(size, fx.Node) else size for size in sizes]
        return tuple(number if isinstance(number, int) and number != -1 else None for number in numbers)

    def _permuted(self, node: fx.Node, before: Known) -> Known | None:
        order = permutation(node)
        return tuple(before[d] for d in order) if before and order is not None else None

    def _concatenated(self, node: fx.Node, rank: int) -> Known | None:
        parts: Any = argument(node, None, 0, "tensors")
        axis = node.kwargs.get("axis", argument(node, None, 1, "dim", 0))
        known = [self.of(part) for part in parts] if isinstance(parts, tuple | list) else []
        if not isinstance(axis, int) or {len(k) for k in known} != {rank}:
            return None
        sizes = [_joined([k[d] for k in known]) for d in range(rank)]
        along = [k[axis] for k in known]
        sizes[axis] = None if None in along else sum(along)  # pyrefly: ignore
        return tuple(sizes)

    def _item(self, node: fx.Node, before: Known) -> Known | None:
        return before[1:] if isinstance(node.args[1], int) else None

    def _selected(self, node: fx.Node, before: Known) -> Known | None:
        if node.target not in ("select", torch.select) or not isinstance(node.args[1], int) or not before:
            return None
        return tuple(size for d, size in enumerate(before) if d != node.args[1] % len(before))

    def _of_number(self, node: fx.Node) -> Any:
        source = first_input(node)
        if source in self._known and node.target in ("size", getattr):
            return self._of_shape(node, self._known[source])
        if node.target not in _ARITHMETIC or node.kwargs:
            return None
        try:
            return node.target(*fx.node.map_arg(node.args, self._numbers.get))  # pyrefly: ignore
        except (TypeError, ValueError, ArithmeticError, LookupError):  # as with None for a size that may change
            return None

    def _of_shape(self, node: fx.Node, known: Known) -> Any:
        """The result of ``x.shape``, ``x.size()`` or ``x.size(d)``."""
        if node.target is getattr:
            return known if node.args[1] == "shape" else None
        dimension = node.kwargs.get("dim", (*node.args, None)[1])
        if dimension is None:
            return known
        return known[dimension] if isinstance(dimension, int) else None


_RULES: dict[str, Callable[[Sizes, fx.Node, Known], Known | None]] = {
    "reshape": Sizes._reshaped,
    "permute": Sizes._permuted,
    "transpose": Sizes._permuted,
    "getitem": Sizes._item,
    "narrow": Sizes._selected,
}


def permutation(node: fx.Node) -> list[int] | None:
    """The order of dimensions after a permutation, if the node is one and the order is known."""
    if node.target not in _MOVES or node.kwargs or not (rank := len(shape_of(node) or ())):
        return None
    wanted = [d % rank for d in _dimensions(node)]
    if node.target in _PERMUTES:
        return wanted if len(wanted) == rank else None
    swapped = dict(zip(wanted, reversed(wanted), strict=True))
    return [swapped.get(d, d) for d in range(rank)] if len(wanted) == 2 else None


def _dimensions(node: fx.Node) -> list[int]:
    """The numbers among the arguments after the tensor, given one by one or together."""
    given: Any = node.args[1:]
    given = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    return [d for d in given if isinstance(d, int)]


def _joined(sizes: list[int | None]) -> int | None:
    """The size of a dimension after broadcasting, if it is known."""
    wide = [size for size in sizes if size not in (None, 1)]
    return wide[0] if wide else 1 if sizes and None not in sizes else None
