"""Pool where an image's mean is taken:  x.mean((2, 3))  ->  flatten(adaptive_avg_pool2d(x, 1)).

Runtimes have an integer kernel for the pool, but often none for the mean. Torch computes both alike, to the last bit.
A mean that is subtracted stays: it normalizes, for which 8 bits are not enough.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from bitwright.graph.build import NodeBuilder, argument
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule

_MEANS = {torch.mean, "mean"}
_POOLS = {4: F.adaptive_avg_pool2d, 5: F.adaptive_avg_pool3d}
_SUBTRACTIONS = {operator.sub, torch.sub, torch.subtract, torch.rsub, "sub", "subtract", "rsub", "sub_"}


@register_schedule("mean_to_pool", stage="simplify", default=False)
class ReplacePattern(ReplacePatternBase):
    """Rewrite every mean over all positions of an image or a volume."""

    done = "rewritten"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("mean", None, _MEANS, _is_a_pool)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> fx.Node:
        node = nodes_dict["mean"]
        build, image = NodeBuilder(model, node), argument(node, 0, "input")
        pooled = build.function(_POOLS[len(shape_of(image) or ())], image, 1)
        return pooled if argument(node, 2, "keepdim", False) else build.function(torch.flatten, pooled, 1)


def _is_a_pool(node: fx.Node, _: object) -> bool | str:
    image, axes = argument(node, 0, "input"), argument(node, 1, "dim")
    rank = len(shape_of(image) or ())
    if rank not in _POOLS or facts(node).written or {"dtype", "out"} & node.kwargs.keys():
        return False
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, int) for axis in axes):
        return "its dimensions are computed" if isinstance(axes, fx.Node) else False
    if sorted(axis % rank for axis in axes) != list(range(2, rank)):
        return "it is not over all positions of each channel"
    return not any(user.target in _SUBTRACTIONS for user in node.users) or "it is subtracted"
