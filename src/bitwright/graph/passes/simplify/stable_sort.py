"""Give sorted values one order, where torch leaves it open.

    sort(x), argsort(x)       ->  the same with stable=True
    topk(x, k, sorted=False)  ->  topk(x, k)

Torch's order depends on the CPU there; runtimes sort what is largest, and keep the order of equal values. Experts sort
their tokens by expert, so everything they compute would stand in another order in the file.
"""

import torch
from torch import fx

from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule

_SORTS = (torch.sort, torch.argsort, "sort", "argsort")
_LARGEST = (torch.topk, "topk")


@register_schedule("stable_sort", stage="simplify")
def stable_sort(model: CapturedModel) -> list[str]:
    """Make every sort stable, and sort what is largest."""
    return [f"{node.name} has one order" for node in list(model.graph.nodes) if _settle(node)]


def _settle(node: fx.Node) -> bool:
    if node.op not in ("call_method", "call_function") or "out" in node.kwargs:
        return False
    if node.target in _SORTS and node.kwargs.get("stable") is not True:
        _set(node, 1, ("dim", "descending"), stable=True)
        return True
    if node.target in _LARGEST and not node.kwargs.get("sorted", node.args[4] if len(node.args) > 4 else True):
        _set(node, 2, ("dim", "largest"), sorted=True)
        return True
    return False


def _set(node: fx.Node, kept: int, names: tuple[str, ...], **changed: bool) -> None:
    """Change an argument, and give those that follow the first ``kept`` by name."""
    named = dict(zip(names, node.args[kept:], strict=False))
    node.args, node.kwargs = node.args[:kept], {**named, **node.kwargs, **changed}
