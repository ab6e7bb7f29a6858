"""What is known of sizes: which dimensions of a tensor no input can change, and what size arithmetic gives."""

import math
import operator
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.expression import is_constant
from bitwright.graph.facts import facts, shape_of
from bitwright.nn.operators import Operator, operator_of

Known = tuple[int | None, ...]  # a size for each dimension; None where it may change with the input
_ARITHMETIC = {
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv, operator.neg),
    *(int, math.prod, max, min),
}


class Sizes:
    """Works out the sizes in one graph, each node once."""

    def __init__(self, graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._known: dict[fx.Node, Known] = {}
        self._numbers: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            shape = shape_of(node)
            if shape is not None:
                self._known[node] = self._of_tensor(node, shape)
            elif facts(node).plain:
                number = self._of_number(node)
                if number is not None:
                    self._numbers[node] = number

    def of(self, node: fx.Node) -> Known:
        """The sizes of a tensor that are the same for all inputs."""
        return self._known.get(node, ())

    def number(self, node: fx.Node) -> Any:
        """What size arithmetic gives if that is the same for all inputs, else None."""
        return self._numbers.get(node)

    def _of_tensor(self, node: fx.Node, shape: tuple[int, ...]) -> Known:
        nothing: Known = (None,) * len(shape)
        if node.op == "get_attr":
            return shape
        kind = operator_of(node, self._modules)
        source = node.args[0] if node.args else node.kwargs.get("input")
        if kind is None or not isinstance(source, fx.Node):
            return nothing
        before = self.of(source)
        if (kind.same_shape or kind.activation) and len(before) == len(shape):
            return before
        if kind.binary and kind.elementwise:
            return self._broadcast(node, shape)
        if kind.weight:
            weight = node.kwargs.get("weight", node.args[1] if len(node.args) > 1 else None)
            fixed = node.op == "call_module" or is_constant(weight)
            return self._after_layer(kind, shape) if fixed else nothing
        found: Known | None = None
        if kind.name == "reshape" and node.target in ("reshape", "view", torch.reshape):
            found = self._reshaped(node)
        elif node.target in ("permute", torch.permute) and len(before) == len(shape):
            found = tuple(before[d] for d in _integers(node.args[1:]))
        elif kind.name == "transpose" and len(node.args) == 3 and len(before) == len(shape):
            found = _swapped(before, *_integers(node.args[1:]))
        elif kind.name == "getitem" and isinstance(node.args[1], int):
            found = before[1:]
        elif node.target in ("select", torch.select) and isinstance(node.args[1], int):
            found = tuple(s for d, s in enumerate(before) if d != node.args[1] % len(before))
        return found if found is not None and len(found) == len(shape) else nothing

    def _broadcast(self, node: fx.Node, shape: tuple[int, ...]) -> Known:
        tensors = [self.of(a) for a in node.args if isinstance(a, fx.Node) and a in self._known]
        sizes: list[int | None] = []
        for d in range(1, len(shape) + 1):
            here = [t[-d] for t in tensors if len(t) >= d]
            wide = [s for s in here if s not in (None, 1)]
            sizes.append(wide[0] if wide else (1 if here and None not in here else None))
        return tuple(reversed(sizes))

    def _after_layer(self, kind: Operator, shape: tuple[int, ...]) -> Known:
        axis = len(shape) + kind.channel_axis
        return tuple(size if d == axis else None for d, size in enumerate(shape))

    def _reshaped(self, node: fx.Node) -> Known | None:
        sizes = node.args[1] if len(node.args) == 2 else node.args[1:]
        sizes = (sizes,) if not isinstance(sizes, tuple | list) else sizes
        found = []
        for size in sizes:
            number = self.number(size) if isinstance(size, fx.Node) else size
            found.append(number if isinstance(number, int) and number != -1 else None)
        return tuple(found)

    def _of_number(self, node: fx.Node) -> Any:
        if node.op == "call_method" and node.target == "size" and isinstance(node.args[0], fx.Node):
            known, dimension = self.of(node.args[0]), node.kwargs.get("dim", (*node.args, None)[1])
            if isinstance(dimension, int) and known:
                return known[dimension]
            return known if dimension is None and None not in known and known else None
        if node.op != "call_function":
            return None
        if node.target is getattr and node.args[1] == "shape":
            known = self.of(node.args[0])  # pyrefly: ignore
            return known if known and None not in known else None
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self._of_item(node.args[0], node.args[1])
        if node.target not in _ARITHMETIC or node.kwargs:
            return None
        values = fx.node.map_arg(node.args, lambda n: self.number(n))  # pyrefly: ignore
        if any(not isinstance(v, int | float) for v in values):
            return None
        return node.target(*values)  # pyrefly: ignore

    def _of_item(self, source: fx.Node, index: Any) -> Any:
        if not isinstance(index, int):
            return None
        if (source.target is getattr and source.args[1] == "shape") or source.target == "size":
            known = self.of(source.args[0]) if len(source.args) < 3 else ()  # pyrefly: ignore
            whole = source.target is getattr or len(source.args) == 1
            return known[index] if whole and -len(known) <= index < len(known) else None
        return None


def _integers(args: Any) -> tuple[int, ...]:
    flat = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    return tuple(a for a in flat if isinstance(a, int))


def _swapped(known: Known, *dimensions: int) -> Known | None:
    if len(dimensions) != 2:
        return None
    order = list(range(len(known)))
    a, b = dimensions
    order[a], order[b] = order[b], order[a]
    return tuple(known[d] for d in order)
