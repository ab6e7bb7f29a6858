"""Expression: a tensor computed of parameters and buffers only, evaluated anew each time, as they train."""

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.graph.facts import facts
from bitwright.graph.model import CapturedModel

# What may be computed of constants: each of these only depends on its arguments.
_FUNCTIONS = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.getitem),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.pow, torch.sqrt, torch.rsqrt, torch.exp),
    *(torch.reshape, torch.unsqueeze, torch.squeeze, torch.flatten, torch.sigmoid, torch.tanh, torch.abs),
    *(torch.narrow, torch.select, torch.permute, torch.transpose, torch.reciprocal, torch.clamp),
}
_METHODS = {
    *("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "exp", "reshape", "view", "unsqueeze", "squeeze"),
    *("flatten", "sigmoid", "tanh", "abs", "narrow", "select", "permute", "transpose", "reciprocal", "clamp"),
    *("contiguous", "float"),
}


class Expression:
    """The value of a node that no input reaches.

    It refers to the modules that own its parameters, and does not own them: names stay as they are, and a value that
    is trained, loaded or moved is seen.
    """

    def __init__(self, model: CapturedModel, node: fx.Node) -> None:
        order = _needed(node)
        place = {n: i for i, n in enumerate(order)}
        self.name = str(node.target) if node.op == "get_attr" else node.name
        self.steps = [_step(model, n, place) for n in order]

    @staticmethod
    def possible(node: object) -> bool:
        """Whether a node is of this kind."""
        if not isinstance(node, fx.Node) or facts(node).written:
            return False
        if node.op == "get_attr":
            return True
        known = (node.op == "call_function" and node.target in _FUNCTIONS) or (
            node.op == "call_method" and node.target in _METHODS
        )
        return known and bool(node.all_input_nodes) and all(Expression.possible(n) for n in node.all_input_nodes)

    def __call__(self) -> Tensor:
        """Evaluate."""
        values: list[Any] = []
        for owner, target, args, kwargs in self.steps:
            if owner is not None:
                values.append(getattr(owner, target))
                continue
            given, named = _put_in(args, values), _put_in(kwargs, values)
            values.append(
                getattr(given[0], target)(*given[1:], **named) if isinstance(target, str) else target(*given, **named)
            )
        return values[-1]

    def owner(self) -> nn.Module | None:
        """The module that has this tensor, where it is read as it is."""
        return self.steps[0][0] if len(self.steps) == 1 else None


class _Place:
    """Stands among arguments for the value of an earlier step."""

    def __init__(self, index: int) -> None:
        self.index = index


def _needed(node: fx.Node) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}

    def visit(n: fx.Node) -> None:
        for before in n.all_input_nodes:
            visit(before)
        found.setdefault(n)

    visit(node)
    return list(found)


def _step(model: CapturedModel, node: fx.Node, place: dict[fx.Node, int]) -> tuple[Any, Any, Any, Any]:
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return model.get_submodule(owner), name, (), {}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _Place(place[n]))  # pyrefly: ignore
    return None, node.target, args, kwargs


def _put_in(item: Any, values: list[Any]) -> Any:
    if isinstance(item, _Place):
        return values[item.index]
    if isinstance(item, tuple | list):
        return type(item)(_put_in(i, values) for i in item)
    if isinstance(item, dict):
        return {key: _put_in(i, values) for key, i in item.items()}
    return item
