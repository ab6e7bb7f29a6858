"""Make linear layers of products with constants:  addmm(b, x, W)  ->  linear(x, Wᵀ, b),  x @ W  ->  linear(x, Wᵀ).

Backends then see weights that a model multiplies by hand (``Conv1D`` of older transformers, a tied head, ``einsum``) as
weights, with a scale for each output. The results have the same bits: torch computes a linear layer with these very
products, or else :func:`bitwright.nn.products.linear_as_written` reverts to what was written.

    W @ x                            ->  linear(xᵀ, W)ᵀ
    baddbmm(b, x, W.expand(n, …))    ->  linear(x, Wᵀ, b)
    einsum("bhld,hdn->bln", x, w)    ->  linear(x as (b, l, h·d), w as (n, h·d))
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from bitwright.graph.build import NodeBuilder, argument
from bitwright.graph.expression import Expression, is_constant
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.products import Layout, Steps, follow, linear_as_written, read_equation

_SUMS = {torch.addmm, "addmm", torch.baddbmm, "baddbmm"}
_BATCHED = {torch.bmm, torch.baddbmm, "bmm", "baddbmm"}
_MATMULS = {operator.matmul, torch.matmul, "matmul", "__matmul__"}
_PRODUCTS = {*_MATMULS, torch.mm, "mm", torch.bmm, "bmm"}


@dataclass(frozen=True)
class _Linear:
    """A product that is a linear layer.

    Attributes:
        x: the tensor.
        constant: the other factor.
        bias: added to each row, or None.
        call: how it was written, for :func:`linear_as_written`; None where a linear layer has the same bits.
        layout: which dimension is which.
        first: whether the constant is the first factor.
    """

    x: fx.Node
    constant: fx.Node
    bias: fx.Node | None
    call: str | None
    layout: Layout
    first: bool = False


@register_schedule("products_to_linear", stage="simplify", after="fold_constants")
class ReplacePattern(ReplacePatternBase):
    """Rewrite every product with a factor that is a matrix of parameters or buffers."""

    done = "made linear"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def begin(self, model: fx.GraphModule) -> None:
        """Keep the model, to see how constants lie in memory."""
        self.model: Any = model

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("product", None, [*_SUMS, *_PRODUCTS, torch.einsum], self._is_linear)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> fx.Node:
        """Bring the factors into the order of a linear layer, and call it."""
        node = nodes_dict["product"]
        found = _linear(node)
        if not isinstance(found, _Linear):
            raise TypeError(f"{node.name} was matched, but is not a linear layer")
        build, layout = NodeBuilder(model, node), found.layout
        self.note(f"{node.name} is a linear layer")
        if found.call is None:
            return build.function(F.linear, found.x, build.function(torch.transpose, found.constant, 0, 1), found.bias)
        x, matrix = _add(build, layout.to_input(), found.x), _add(build, layout.to_matrix(), found.constant)
        written = {
            "call": found.call,
            "labels": (layout.tensor, layout.constant, layout.result),
            "shape": layout.shape,
            "first": found.first,
            "contiguous": Expression(model, found.constant)().is_contiguous(),
        }
        return _add(
            build,
            layout.from_output(),
            build.function(linear_as_written, x, matrix, found.bias, name=node.name, **written),
        )

    def _is_linear(self, node: fx.Node, _: object) -> bool | str:
        if facts(node).written or "out" in node.kwargs:
            return False
        found = _linear(node)
        if not isinstance(found, _Linear) or found.call is None:
            return found if isinstance(found, str) else found is not None
        constant = Expression(self.model, found.constant)()
        back = follow(found.layout.from_matrix(), follow(found.layout.to_matrix(), constant))
        if back.stride() == constant.stride() or constant.is_contiguous():
            return True
        return "its constant lies in memory in another order than its matrix"


def _add(build: NodeBuilder, steps: Steps, node: fx.Node) -> fx.Node:
    for method, args in steps:
        node = build.method(method, node, *args)
    return node


def _linear(node: fx.Node) -> _Linear | str | None:
    """The linear layer that a product is, the reason why it is not one, or None where that is obvious."""
    if node.target is torch.einsum:
        return _of_equation(node)
    bias, a, b = _factors(node)
    if any(node.kwargs.get(n, 1) != 1 for n in ("alpha", "beta")) or not _is_bias(bias):
        return None
    if is_constant(b) and not is_constant(a):
        return _of_matrix(node, a, b, bias)
    return _of_matrix(node, b, a, None, first=True) if bias is None and is_constant(a) and not is_constant(b) else None


def _of_matrix(node: fx.Node, x: Any, constant: fx.Node, bias: Any, first: bool = False) -> _Linear | None:
    rank, shape = len(shape_of(x) or ()), shape_of(constant) or ()
    if len(shape) != 2 or rank < 2:
        return None
    kept = "bcdefghjklm"[: rank - 2]
    labels = (f"{kept}in", "oi", f"{kept}on") if first else (f"{kept}ni", "io", f"{kept}no")
    call = "bmm" if node.target in _BATCHED else "matmul" if first else None
    return _Linear(x, constant, bias, call, Layout(*labels, shape), first)


def _is_bias(bias: object) -> bool:
    return bias is None or (len(shape_of(bias) or ()) == 1 and is_constant(bias))


def _factors(node: fx.Node) -> tuple[Any, Any, Any]:
    """The bias or None, and both factors; for one repeated for each sample, what is repeated."""
    batched, summed = node.target in _BATCHED, node.target in _SUMS
    if summed:
        names = ("batch1", "batch2") if batched else ("mat1", "mat2")
    else:
        names = ("input", "other" if node.target in _MATMULS else "mat2")
    a, b = (argument(node, i + summed, name) for i, name in enumerate(names))
    if batched:
        a, b = _source(a), _source(b)
    return argument(node, 0, "input") if summed else None, a, b


def _source(factor: object) -> Any:
    """The matrix that a factor of a batched product repeats for each sample, or the factor itself."""
    if not isinstance(factor, fx.Node) or factor.target not in ("expand", torch.broadcast_to, "broadcast_to"):
        return factor
    source = factor.args[0]
    return source if shape_of(source) == (shape_of(factor) or ())[-2:] else factor


def _of_equation(node: fx.Node) -> _Linear | str | None:
    equation, *factors = node.args
    constants = [i for i, factor in enumerate(factors) if is_constant(factor)]
    if not isinstance(equation, str) or not 0 < len(constants) < len(factors):
        return None
    if len(factors) != 2:
        return "it does not have two factors"
    (position,) = constants
    x, constant = (factors[i] for i in (1 - position, position))
    shapes = [shape_of(factor) or () for factor in (x, constant)]
    layout = read_equation(equation, position, *shapes)
    first = position == 0
    return layout if isinstance(layout, str) else _Linear(x, constant, None, equation, layout, first)  # pyrefly: ignore
