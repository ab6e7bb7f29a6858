"""Products of a tensor and a constant that are linear layers, computed as written.

    einsum("bld,dhk->bhlk", x, w)  =  unflatten(linear(x, m)),      m = w as a matrix (outputs, inputs)

torch rounds ``einsum``, ``bmm`` and ``linear`` differently, in the last bit. To keep a prepared model equal to the
original, :func:`linear_as_written` reverts to the original product; the deployed model computes a plain linear layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Steps = list[tuple[str, tuple[Any, ...]]]
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Layout:
    """Which dimensions of a tensor, a constant and their product correspond, as letters like in ``einsum``.

    Attributes:
        tensor: the dimensions of the tensor.
        constant: those of the constant.
        result: those of the product.
        shape: the sizes of the constant.
    """

    tensor: str
    constant: str
    result: str
    shape: tuple[int, ...]

    def why_not(self, given: Sequence[int]) -> str | None:
        """Why the product with a tensor of these sizes is not a linear layer, or None if it is."""
        if any(len(set(labels)) < len(labels) for labels in (self.tensor, self.constant, self.result)):
            return "it takes a diagonal"
        if several := set(self.tensor) & set(self.constant) & set(self.result):
            return f"each {sorted(several)[0]} has its own matrix"
        if set(self.result) != set(self.tensor) ^ set(self.constant):
            return "it sums dimensions of one factor"
        if not self.summed or not self.made:
            return "it is not a matrix product"
        fits = self.sizes(self.summed) == tuple(given[self.tensor.index(n)] for n in self.summed)
        return None if fits else "it repeats a dimension of size 1"

    @cached_property
    def summed(self) -> str:
        """The dimensions that are summed over, in the tensor's order."""
        return "".join(n for n in self.tensor if n in self.constant)

    @cached_property
    def made(self) -> str:
        """The dimensions that the constant adds, in the result's order."""
        return "".join(n for n in self.result if n in self.constant)

    @cached_property
    def kept(self) -> str:
        """The dimensions that the result keeps from the tensor, in the tensor's order."""
        return "".join(n for n in self.tensor if n in self.result)

    def sizes(self, labels: str) -> tuple[int, ...]:
        """The sizes of dimensions of the constant."""
        return tuple(self.shape[self.constant.index(n)] for n in labels)

    def to_input(self) -> Steps:
        """From the tensor to a linear layer's input (…, inputs)."""
        return [*_permute(self.tensor, self.kept + self.summed), *_flatten(self.summed)]

    def from_input(self) -> Steps:
        """The way back."""
        return [*self._unflatten(self.summed), *_permute(self.kept + self.summed, self.tensor)]

    def to_matrix(self) -> Steps:
        """From the constant to a linear layer's weight (outputs, inputs)."""
        size = tuple(math.prod(self.sizes(labels)) for labels in (self.made, self.summed))
        plain = len(self.shape) == 2
        return [*_permute(self.constant, self.made + self.summed), *([] if plain else [("reshape", size)])]

    def from_matrix(self) -> Steps:
        """The way back."""
        size = self.sizes(self.made + self.summed)
        plain = len(self.shape) == 2
        return [*([] if plain else [("reshape", size)]), *_permute(self.made + self.summed, self.constant)]

    def from_output(self) -> Steps:
        """From a linear layer's output (…, outputs) to the result."""
        return [*self._unflatten(self.made), *_permute(self.kept + self.made, self.result)]

    def to_output(self) -> Steps:
        """The way back."""
        return [*_permute(self.result, self.kept + self.made), *_flatten(self.made)]

    def _unflatten(self, labels: str) -> Steps:
        return [("unflatten", (-1, self.sizes(labels)))] if len(labels) > 1 else []


def _permute(labels: str, wanted: str) -> Steps:
    return [("permute", tuple(labels.index(n) for n in wanted))] if labels != wanted else []


def _flatten(labels: str) -> Steps:
    return [("flatten", (-len(labels),))] if len(labels) > 1 else []


def follow(steps: Steps, tensor: Tensor) -> Tensor:
    """Apply methods one after the other."""
    for method, args in steps:
        tensor = getattr(tensor, method)(*args)
    return tensor


def read_equation(equation: str, position: int, given: Sequence[int], shape: Sequence[int]) -> Layout | str:
    """The layout of an ``einsum`` equation with two factors, or why it is not a linear layer.

    ``position`` is that of the constant, 0 or 1; ``given`` are the sizes of the other factor, ``shape`` the constant's.
    """
    written, arrow, result = equation.replace(" ", "").partition("->")
    factors = written.split(",")
    constant, tensor = factors[position], factors[1 - position]
    if not arrow:
        once = sorted(n for n in written if n.isalpha() and written.count(n) == 1)
        result = "..." * ("..." in tensor) + "".join(once)
    if "..." in constant or ("..." in result) != ("..." in tensor):
        return "it sums or repeats dimensions without a name"
    free = "".join(n for n in _LETTERS if n not in equation)[: len(given) + 3 - len(tensor)]
    layout = Layout(tensor.replace("...", free), constant, result.replace("...", free), tuple(shape))
    return layout.why_not(given) or layout


def linear_as_written(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    call: str,
    labels: tuple[str, str, str],
    shape: tuple[int, ...],
    first: bool,
    contiguous: bool,
) -> Tensor:
    """A linear layer's output (…, outputs), equal to the bit to the product that the author wrote.

    Args:
        input: (…, inputs).
        weight: (outputs, inputs).
        bias: (outputs); only ``baddbmm`` has one.
        call: ``"matmul"``, ``"bmm"`` for it and ``baddbmm``, or an equation of ``einsum``.
        labels: the dimensions of the tensor, the constant and the result that the author wrote.
        shape: the sizes of the constant.
        first: whether the constant is the first factor.
        contiguous: whether the constant is contiguous, on which the last bit may depend.
    """
    layout = Layout(*labels, tuple(shape))
    x, constant = follow(layout.from_input(), input), follow(layout.from_matrix(), weight)
    if contiguous:
        constant = constant.contiguous()
    if call == "bmm":
        constant = constant.expand(x.shape[0], -1, -1)
    a, b = (constant, x) if first else (x, constant)
    if call == "matmul":
        result = torch.matmul(a, b)
    elif call == "bmm":
        result = torch.bmm(a, b) if bias is None else torch.baddbmm(bias, a, b)
    else:
        result = torch.einsum(call, a, b)
    return follow(layout.to_output(), result)


def deployed_function(function: object) -> Any:  # noqa: ANN401
    """The function that a deployed model computes instead."""
    return _plain if function is linear_as_written else function


def _plain(input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: object) -> Tensor:
    return F.linear(input, weight, bias)
