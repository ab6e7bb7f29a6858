"""Merge views that follow each other:  x.reshape(a).reshape(b)  ->  x.reshape(b),  permutations into one or none.

permute(permute(x, p), q) = permute(x, [p[i] for i in q]),   and for the order 0, 1, 2 … the tensor itself
"""

from typing import Any

import torch
from torch import fx

from bitwright.graph.build import NodeBuilder
from bitwright.graph.facts import facts
from bitwright.graph.match import InputMatchType, MatcherNode
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.sizes import permutation

_RESHAPES = {"reshape", "view", torch.reshape}
# Operations that only change the shape, which the reshape after them does not need.
_SHAPE_ONLY = _RESHAPES | {"flatten", torch.flatten, "unsqueeze", torch.unsqueeze, "squeeze", torch.squeeze}
_PERMUTATIONS = {"permute", torch.permute, "transpose", torch.transpose, "swapaxes", torch.swapaxes}


@register_schedule("merge_reshapes", stage="simplify", after=("unbind_to_select", "remove_identity", "remove_dropout"))
class ReplacePattern(ReplacePatternBase):
    """Merge two views into one if nothing else reads the first."""

    done = "merged"

    def make_ops(self) -> list[MatcherNode]:
        views = [*_SHAPE_ONLY, *_PERMUTATIONS]
        return [
            MatcherNode("before", None, views, _is_unwritten),
            MatcherNode("view", ["before"], views, _is_unwritten, InputMatchType.FIRST),
        ]

    def make_joint_checkers(self) -> list[Any]:
        """Both must change the shape, or both the order of dimensions."""

        def fit(before: fx.Node, view: fx.Node, _: object) -> bool | str:
            if not _are_reshapes(before, view) and not _are_permutations(before, view):
                return False
            return len(before.users) == 1 or f"with {before.name}, which has {len(before.users)} users"

        return [(("before", "view"), fit)]

    def near_miss(self, node: fx.Node, reason: str) -> None:
        self.note(f"not merged: {node.name} {reason}")

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> fx.Node | None:
        before, view = nodes_dict["before"], nodes_dict["view"]
        if _are_permutations(before, view):
            return self._merge_permutations(model, before, view)
        view.target = torch.reshape if view.op == "call_function" else "reshape"  # a view may not exist further back
        view.update_arg(0, before.args[0])
        model.graph.erase_node(before)
        self.note(f"merged {before.name} into {view.name}")
        return None

    def _merge_permutations(self, model: CapturedModel, before: fx.Node, view: fx.Node) -> fx.Node:
        first, second = permutation(before) or [], permutation(view) or []
        order = [first[i] for i in second]
        source: Any = before.args[0]
        if order == sorted(order):
            self.note(f"removed {before.name} and {view.name}, which undo each other")
            return source
        merged = NodeBuilder(model, view).function(torch.permute, source, tuple(order))
        self.note(f"merged {before.name} and {view.name} into {merged.name}")
        return merged


def _are_reshapes(before: fx.Node, view: fx.Node) -> bool:
    by_type = any(isinstance(a, torch.dtype) for n in (before, view) if n.target == "view" for a in n.args)
    return view.target in _RESHAPES and before.target in _SHAPE_ONLY and not by_type


def _are_permutations(before: fx.Node, view: fx.Node) -> bool:
    return permutation(before) is not None and permutation(view) is not None


def _is_unwritten(node: fx.Node, _: object) -> bool:
    return bool(node.args) and not facts(node).written
