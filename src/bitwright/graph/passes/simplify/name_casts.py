"""Name casts that only change the precision of float tensors:  x.to(torch.float32), x.half()  ->  cast_float(x, dtype).

Methods cast numbers of any kind. This function is known to take and return floats, so a quantizer's scale still fits
its result, and no other quantizer is placed.
"""

from typing import Any

import torch
from torch import fx

from bitwright.graph.build import NodeBuilder
from bitwright.graph.facts import dtype_of, is_floating
from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.operators.moves import cast_float

_NAMED = ("float", "half", "bfloat16", "double")


@register_schedule("name_casts", stage="simplify")
class ReplacePattern(ReplacePatternBase):
    """Rewrite every cast from one float type to one that the call names, which may be the same."""

    done = "named"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("cast", None, ["to", "type", *_NAMED], _casts_floats)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> fx.Node:
        node = nodes_dict["cast"]
        return NodeBuilder(model, node).function(cast_float, node.args[0], dtype_of(node))


def _casts_floats(node: fx.Node, _: object) -> bool:
    given = [*node.args[1:], *node.kwargs.values()]
    to_a_type = isinstance(given[0], torch.dtype) if len(given) == 1 else not given and node.target in _NAMED
    return to_a_type and is_floating(node.args[0]) and is_floating(node)
