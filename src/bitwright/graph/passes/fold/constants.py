"""Sums and products with constants, read from the graph: which operand is the constant, and where it varies."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from bitwright.graph.expression import Expression, is_constant
from bitwright.graph.facts import is_floating, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.walks import needed_for
from bitwright.nn.attention_parts import add_mask

ARITHMETIC: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((operator.add, torch.add, "add", add_mask), torch.add),
    **dict.fromkeys((operator.sub, torch.sub, torch.subtract, "sub"), torch.sub),
    **dict.fromkeys((operator.mul, torch.mul, torch.multiply, "mul"), torch.mul),
    **dict.fromkeys((operator.truediv, torch.div, torch.divide, torch.true_divide, "div"), torch.div),
}


def read_constant(node: fx.Node) -> tuple[fx.Node, Any, bool] | None:
    """The tensor that a sum or product computes on, its constant, and whether the constant comes first."""
    if node.target not in ARITHMETIC or node.kwargs or len(node.args) != 2:
        return None
    for first in (False, True):
        constant, tensor = node.args if first else node.args[::-1]
        number = isinstance(constant, int | float) and not isinstance(constant, bool)
        if isinstance(tensor, fx.Node) and (number or is_constant(constant)) and not is_constant(tensor):
            return tensor, constant, first
    return None


def as_constant(model: CapturedModel, constant: Any) -> Expression | float:
    """A constant operand as something that can be asked for its value at any time."""
    return Expression(model, constant) if isinstance(constant, fx.Node) else constant


def why_not_constant(constant: Any, written: set[str]) -> str | None:
    """Why a constant operand may have another value by the time it is used, or None."""
    read = needed_for([constant]) if isinstance(constant, fx.Node) else []
    targets = [str(node.target) for node in read if node.op == "get_attr"]
    return next((f"the model writes into {target}" for target in targets if target in written), None)


def why_not_per_channel(constant: Any, tensor: fx.Node, axis: int) -> str | None:
    """Why a constant is not one number, or one for each channel of a tensor; ``axis`` counts from the last, -1."""
    if not isinstance(constant, fx.Node):
        return None
    shape, full = shape_of(constant), shape_of(tensor)
    if shape is None or full is None or not is_floating(constant):
        return "its constant is no float tensor"
    wide = [d - len(shape) for d, size in enumerate(shape) if size != 1]
    if len(shape) > len(full) or any(d != axis for d in wide) or (wide and shape[axis] != full[axis]):
        return "its constant differs along other axes than the layer's channels"
    return None
