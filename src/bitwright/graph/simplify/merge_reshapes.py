"""Merge views that follow each other:  x.reshape(a).reshape(b)  ->  x.reshape(b),  permutations into one or none.

    permute(permute(x, p), q) = permute(x, [p[i] for i in q]),   and for the order 0, 1, 2 … the tensor itself
"""

from typing import Any

import torch
from torch import fx

from bitwright.graph.build import NodeBuilder, replace, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.schedule import register_schedule

_RESHAPES = {"reshape", "view", torch.reshape}
# What only changes the shape: the reshape after it does not need it.
_SHAPE_ONLY = _RESHAPES | {"flatten", torch.flatten, "unsqueeze", torch.unsqueeze, "squeeze", torch.squeeze}
_PERMUTES = {"permute", torch.permute}
_TRANSPOSES = {"transpose", torch.transpose, "swapaxes", torch.swapaxes}


@register_schedule("merge_reshapes", stage="simplify")
def merge_reshapes(model: CapturedModel) -> list[str]:
    """Merge what can be, and say why not where something else reads the first of two."""
    notes = []
    for node in list(model.graph.nodes):
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or node.meta.get("written") or before.meta.get("written"):
            continue
        if node.target in _RESHAPES and before.target in _SHAPE_ONLY and not _is_dtype_view(node, before):
            merge = _merge_reshape
        elif permutation(node) is not None and permutation(before) is not None:
            merge = _merge_permutation
        else:
            continue
        if len(before.users) > 1:
            notes.append(f"not merged: {node.name} with {before.name}, which has {len(before.users)} users")
            continue
        notes.append(merge(model, node, before))
    return notes


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
    if not all(isinstance(d, int) for d in given):
        return None
    wanted = [d % len(shape) for d in given]  # pyrefly: ignore
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
