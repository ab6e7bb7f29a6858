"""Fold a BatchNorm into the convolution or linear layer before it:  bn(conv(x))  ->  conv'(x).

    w' = w · γ/√(var + eps),   b' = (b - mean) · γ/√(var + eps) + β

The BatchNorm keeps its place and name in the model; see ``QuantLayer`` for when which form is computed.
"""

from collections import Counter

from torch import fx, nn

from bitwright.graph.model import CapturedModel
from bitwright.graph.schedule import register_schedule
from bitwright.nn.layer import BatchNorm, QuantLayer


@register_schedule("fold_batchnorm", stage="fuse", aliases=("fuse_bn",))
def fold_batchnorm(model: CapturedModel) -> list[str]:
    """Fold every BatchNorm that can be, and say why the others cannot."""
    modules = dict(model.named_modules())
    calls = Counter(str(n.target) for n in model.graph.nodes if n.op == "call_module")
    notes = []
    for node in list(model.graph.nodes):
        norm = modules.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(norm, BatchNorm):
            continue
        before = node.all_input_nodes[0]
        layer = modules.get(str(before.target)) if before.op == "call_module" else None
        if not isinstance(layer, QuantLayer) or not hasattr(layer, "weight"):
            name = before.target if before.op == "call_module" else before.name
            notes.append(f"not folded: {node.target}, {name} before it is not a quantized layer with a weight")
        elif reason := _why_not(node, norm, before, layer, calls):
            notes.append(f"not folded: {node.target}, {reason}")
        else:
            layer.fold_norm(norm)
            node.replace_all_uses_with(before)
            model.graph.erase_node(node)
            notes.append(f"folded {node.target} into {before.target}")
    return notes


def _why_not(node: fx.Node, norm: BatchNorm, before: fx.Node, layer: QuantLayer, calls: Counter[str]) -> str | None:
    if len(before.users) > 1:
        return f"{before.target} before it has {len(before.users)} users"
    if calls[str(before.target)] > 1 or calls[str(node.target)] > 1:
        return "it or the layer before it is called more than once"
    if norm.running_mean is None:
        return "it has no running statistics"
    info = before.meta.get("tensor")
    if isinstance(layer, nn.Linear) and (info is None or len(info.shape) != 2):
        return "it normalises another axis than the one the linear layer produces"
    return None
