"""Merge views that follow each other:  x.reshape(a).reshape(b)  ->  x.reshape(b),  permutations into one or none.

permute(permute(x, p), q) = permute(x, [p[i] for i in q]),   and for the order 0, 1, 2 … the tensor itself
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from bitwright.graph.build import NodeBuilder, replace
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule

_RESHAPES = {"reshape", "view", torch.reshape}
# What only changes the shape: the reshape after it does not need it.
_SHAPE_ONLY = _RESHAPES | {"flatten", torch.flatten, "unsqueeze", torch.unsqueeze, "squeeze", torch.squeeze}
_PERMUTES = {"permute", torch.permute}
_TRANSPOSES = {"transpose", torch.transpose, "swapaxes", torch.swapaxes}


@register_schedule("merge_reshapes", stage="simplify", after=("unbind_to_select", "remove_identity", "remove_dropout"))
def merge_reshapes(model: CapturedModel) -> list[str]:
    """Merge what can be, and say why not where something else reads the first of two."""
    notes = []
    for node in list(model.graph.nodes):
        while (merge := _merge_for(node)) is not None:
            before: Any = node.args[0]
            if len(before.users) > 1:
                notes.append(f"not merged: {node.name} with {before.name}, which has {len(before.users)} users")
                break
            notes.append(merge(model, node, before))
            if merge is _merge_permutation:
                break  # another node stands in its place
    return notes


def _merge_for(node: fx.Node) -> Callable[[CapturedModel, fx.Node, fx.Node], str] | None:
    """How a node is merged with the one before it, if it can be."""
    before = node.args[0] if node.args else None
    if not isinstance(before, fx.Node) or facts(node).written or facts(before).written:
        return None
    if node.target in _RESHAPES and before.target in _SHAPE_ONLY and not _is_dtype_view(node, before):
        return _merge_reshape
    return _merge_permutation if permutation(node) is not None and permutation(before) is not None else None


def _merge_reshape(model: CapturedModel, node: fx.Node, before: fx.Node) -> str:
    node.target = torch.reshape if node.op == "call_function" else "reshape"  # a view may not exist from further back
    node.update_arg(0, before.args[0])
    model.graph.erase_node(before)
    return f"merged {before.name} into {node.name}"


def _merge_permutation(model: CapturedModel, node: fx.Node, before: fx.Node) -> str:
    first, second = permutation(before) or [], permutation(node) or []
    order = [first[i] for i in second]
    source: Any = before.args[0]
    name = node.name
    if order == sorted(order):
        replace(node, source)
        model.graph.erase_node(before)
        return f"removed {before.name} and {name}, which undo each other"
    merged = NodeBuilder(model, node).function(torch.permute, source, tuple(order))
    replace(node, merged)
    model.graph.erase_node(before)
    return f"merged {before.name} and {name} into {merged.name}"


def permutation(node: fx.Node) -> list[int] | None:
    """The order in which a permutation puts dimensions, if a node is one and the order is known."""
    shape = shape_of(node)
    if node.target not in _PERMUTES | _TRANSPOSES or not shape or node.kwargs:
        return None
    given = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
    wanted = [d % len(shape) for d in given if isinstance(d, int)]
    if node.target in _PERMUTES and len(wanted) == len(shape):
        return wanted
    if node.target in _TRANSPOSES and len(wanted) == 2:
        order = list(range(len(shape)))
        a, b = wanted
        order[a], order[b] = b, a
        return order
    return None


def _is_dtype_view(*nodes: fx.Node) -> bool:
    return any(n.target == "view" and any(isinstance(a, torch.dtype) for a in n.args) for n in nodes)
