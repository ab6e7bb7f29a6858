"""Make linear layers of products with constants:  addmm(b, x, W)  ->  linear(x, Wᵀ, b),  x @ W  ->  linear(x, Wᵀ).

So weights that a model multiplies by hand (``Conv1D`` of older transformers, a tied head) are weights to backends, with
a scale for each output. The results are the same bits: torch computes a linear layer by these very products.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from bitwright.graph.build import NodeBuilder, argument
from bitwright.graph.expression import is_constant
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule

_SUMS = {torch.addmm, "addmm"}
_PRODUCTS = {operator.matmul, torch.matmul, torch.mm, "matmul", "mm", "__matmul__"}


@register_schedule("products_to_linear", stage="simplify", after="fold_constants")
class ReplacePattern(ReplacePatternBase):
    """Rewrite every product whose second factor is a matrix of parameters or buffers."""

    done = "made linear"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("product", None, _SUMS | _PRODUCTS, _is_linear)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> fx.Node:
        """Transpose the matrix, and call ``F.linear``."""
        node = nodes_dict["product"]
        bias, x, matrix = _factors(node)
        build = NodeBuilder(model, node)
        made = build.function(F.linear, x, build.function(torch.transpose, matrix, 0, 1), bias)
        self.note(f"{node.name} is a linear layer")
        return made


def _factors(node: fx.Node) -> tuple[Any, Any, Any]:
    """The bias or None, what is multiplied, and the matrix."""
    if node.target in _SUMS:
        return argument(node, 0, "input"), argument(node, 1, "mat1"), argument(node, 2, "mat2")
    second = "mat2" if node.target in (torch.mm, "mm") else "other"
    return None, argument(node, 0, "input"), argument(node, 1, second)


def _is_linear(node: fx.Node, _: Any) -> bool:
    bias, x, matrix = _factors(node)
    plain = all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta")) and "out" not in node.kwargs
    if not plain or facts(node).written or len(shape_of(matrix) or ()) != 2 or len(shape_of(x) or ()) < 2:
        return False
    fits = bias is None or (len(shape_of(bias) or ()) == 1 and is_constant(bias))
    return fits and is_constant(matrix) and not is_constant(x)
