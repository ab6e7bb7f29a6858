"""Sort equal values in the order they come in.

    sort(x), argsort(x)  ->  the same with stable=True

Torch leaves the order of equal values open, and it depends on the CPU; runtimes keep it. Experts sort their tokens by
expert, so everything they compute would stand in another order in the file.
"""

import torch
from torch import fx

from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule

_FUNCTIONS = (torch.sort, torch.argsort)
_METHODS = ("sort", "argsort")


@register_schedule("stable_sort", stage="simplify")
def stable_sort(model: CapturedModel) -> list[str]:
    """Make every sort stable."""
    found = [node for node in model.graph.nodes if _sorts(node) and node.kwargs.get("stable") is not True]
    for node in found:
        named = dict(zip(("dim", "descending"), node.args[1:], strict=False))
        node.args, node.kwargs = node.args[:1], {**named, **node.kwargs, "stable": True}
    return [f"{node.name} keeps the order of equal values" for node in found]


def _sorts(node: fx.Node) -> bool:
    called = _METHODS if node.op == "call_method" else _FUNCTIONS
    return node.op in ("call_method", "call_function") and node.target in called and "out" not in node.kwargs
