"""Expression: a tensor computed only from parameters and buffers, evaluated at every use because they train."""

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.graph.evaluate import call_target
from bitwright.graph.facts import facts
from bitwright.graph.walks import needed_for

# Functions that depend only on their arguments, so they can be computed from constants.
_FUNCTIONS = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.getitem),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.pow, torch.sqrt, torch.rsqrt, torch.exp),
    *(torch.reshape, torch.unsqueeze, torch.squeeze, torch.flatten, torch.sigmoid, torch.tanh, torch.abs),
    *(torch.narrow, torch.select, torch.permute, torch.transpose, torch.t, torch.reciprocal, torch.clamp),
}
_METHODS = {
    *("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "exp", "reshape", "view", "unsqueeze", "squeeze"),
    *("flatten", "sigmoid", "tanh", "abs", "narrow", "select", "permute", "transpose", "reciprocal", "clamp"),
    *("contiguous", "float", "t"),
}


def is_constant(node: object) -> bool:
    """Whether a node is computed only from parameters and buffers, by functions known to allow that."""
    if not isinstance(node, fx.Node) or not _is_allowed(node):
        return False
    found, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if not _is_allowed(source):  # checked before recursing: a chain of sums can be as long as the model
                return False
            if source not in found:
                found.add(source)
                waiting.append(source)
    return True


def _is_allowed(node: fx.Node) -> bool:
    if facts(node).written:
        return False
    if node.op == "get_attr":
        return True
    known = _FUNCTIONS if node.op == "call_function" else _METHODS if node.op == "call_method" else ()
    return node.target in known and bool(node.all_input_nodes)


class Expression:
    """The value of a node of which :func:`is_constant` is true.

    It refers to the modules that own its parameters without owning them: names do not change, and it sees any value
    that is trained, loaded or moved.
    """

    def __init__(self, model: nn.Module, node: fx.Node) -> None:
        order = needed_for([node])
        place = {n: i for i, n in enumerate(order)}
        self.steps = tuple(_step(model, n, place) for n in order)

    def __call__(self) -> Tensor:
        values: list[Any] = []
        for owner, target, args, kwargs in self.steps:
            if owner is not None:
                values.append(getattr(owner, target))
            else:
                values.append(call_target(target, _put_in(args, values), _put_in(kwargs, values)))
        return values[-1]

    @property
    def owner(self) -> nn.Module | None:
        """The module that owns this tensor, if the tensor is read unchanged."""
        return self.steps[0][0] if len(self.steps) == 1 else None


class _Place:
    """Stands among arguments for the value of an earlier step."""

    def __init__(self, index: int) -> None:
        self.index = index


def _step(model: nn.Module, node: fx.Node, place: dict[fx.Node, int]) -> tuple[Any, Any, Any, Any]:
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return model.get_submodule(owner), name, (), {}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _Place(place[n]))  # pyrefly: ignore
    return None, node.target, args, kwargs


def _put_in(item: object, values: list[Any]) -> Any:
    if isinstance(item, _Place):
        return values[item.index]
    if isinstance(item, tuple | list):
        return type(item)(_put_in(i, values) for i in item)
    if isinstance(item, dict):
        return {key: _put_in(i, values) for key, i in item.items()}
    return item
