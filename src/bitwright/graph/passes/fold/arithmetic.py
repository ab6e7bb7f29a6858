"""Sums and products with constants, read from the graph: which operand is the constant, and where it varies."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.expression import Expression, is_constant
from bitwright.graph.facts import facts, is_floating, shape_of
from bitwright.graph.walks import needed_for
from bitwright.nn.attention_parts import add_mask
from bitwright.nn.fold import ArithmeticFold

OPERATORS = ("op:add", "op:sub", "op:mul", "op:div", "op:add_mask")
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((operator.add, torch.add, "add", add_mask), torch.add),
    **dict.fromkeys((operator.sub, torch.sub, torch.subtract, "sub"), torch.sub),
    **dict.fromkeys((operator.mul, torch.mul, torch.multiply, "mul"), torch.mul),
    **dict.fromkeys((operator.truediv, torch.div, torch.divide, torch.true_divide, "div"), torch.div),
}


@dataclass(frozen=True)
class Arithmetic:
    """A sum, difference, product or quotient of a tensor and a constant.

    Attributes:
        node: where it is computed.
        function: ``torch.add``, ``torch.sub``, ``torch.mul`` or ``torch.div``.
        tensor: the operand that depends on the model's inputs.
        constant: the other one, a number or a node.
        first: whether the constant is the first operand.
    """

    node: fx.Node
    function: Callable[..., Any]
    tensor: fx.Node
    constant: Any
    first: bool

    @classmethod
    def read(cls, node: fx.Node) -> "Arithmetic | None":
        """Read a node, if it is one of these."""
        function = _FUNCTIONS.get(node.target)
        if function is None or node.kwargs or len(node.args) != 2:
            return None
        for first in (False, True):
            constant, tensor = node.args if first else node.args[::-1]
            if isinstance(tensor, fx.Node) and _is_number_or_constant(constant) and not is_constant(tensor):
                return cls(node, function, tensor, constant, first)
        return None

    @property
    def shifts(self) -> bool:
        """Whether it adds something, or only multiplies."""
        return self.function in (torch.add, torch.sub)

    @property
    def only_scales(self) -> bool:
        """Whether it multiplies or divides by a positive number."""
        if self.shifts or self.divides_by_tensor or isinstance(self.constant, fx.Node):
            return False
        return 0 < self.constant < math.inf and self.why_not(-1, set) is None

    @property
    def divides_by_tensor(self) -> bool:
        """Whether the tensor is the divisor, so that this is not a map  x·c + d."""
        return self.function is torch.div and self.first

    def fold(self, model: nn.Module, axis: int) -> ArithmeticFold:
        """This arithmetic as a fold; the layer that takes it has its channels on ``axis``, with -1 for the last."""
        value = Expression(model, self.constant) if isinstance(self.constant, fx.Node) else self.constant
        return ArithmeticFold(self.function, value, self.first, axis)

    def why_not(self, axis: int, written: Callable[[], set[str]]) -> str | None:
        """Why the constant is not a number, or one for each channel on ``axis``, that stays unchanged until used."""
        if facts(self.node).written or facts(self.tensor).written:
            return "it shares memory with a tensor that is written to in place"
        if facts(self.node).tensor != facts(self.tensor).tensor:
            return "the constant changes the shape or type of the result"
        if not isinstance(self.constant, fx.Node):
            return None
        read = [str(node.target) for node in needed_for([self.constant]) if node.op == "get_attr"]
        if changed := [target for target in read if target in written()]:
            return f"the model writes into {changed[0]}"
        return self._why_not_per_channel(axis)

    def _why_not_per_channel(self, axis: int) -> str | None:
        shape, full = shape_of(self.constant), shape_of(self.tensor) or ()
        if shape is None or not is_floating(self.constant):
            return "its constant is not a float tensor"
        wide = {d - len(shape): size for d, size in enumerate(shape) if size != 1}
        fits = len(shape) <= len(full) and (not wide or wide == {axis: full[axis]})
        return None if fits else "its constant varies along axes other than the layer's channels"


def _is_number_or_constant(value: object) -> bool:
    return is_constant(value) or (isinstance(value, int | float) and not isinstance(value, bool))
