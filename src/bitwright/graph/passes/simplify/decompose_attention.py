"""Take ``scaled_dot_product_attention`` apart, so that a backend can run its products in integers.

    sdpa(q, k, v)  ->  softmax(q·kᵀ·scale + mask) · v,      scale = 1/√d where none is given

Off unless asked for: the parts round differently from torch's fused kernels (about 1e-6 of the values), so a prepared
model would no longer equal the original to the last bit. All arguments are honoured: boolean and float masks, rows that
a mask hides completely (zeros), causal, scale, dropout, and grouped queries.
"""

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.graph.build import NodeBuilder, module_of, replace
from bitwright.graph.facts import dtype_of, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.attention_parts import AttentionProduct, add_mask

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@register_schedule("decompose_attention", stage="simplify", after="split_attention", default=False, tolerance=1e-5)
def decompose_attention(model: CapturedModel) -> list[str]:
    """Decompose every attention, of functions and of split modules."""
    notes = []
    for node in list(model.graph.nodes):
        module = module_of(node, model)
        fused = isinstance(module, AttentionProduct)
        if not fused and node.target is not F.scaled_dot_product_attention:
            continue
        names = ("query", "key", "value", "attn_mask", "is_causal") if fused else _NAMES
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if any(shape_of(given.get(name)) is None for name in ("query", "key", "value")):
            notes.append(f"not decomposed: {node.name}, its inputs are no tensors")
            continue
        build = NodeBuilder(model, node)
        drop = None
        if isinstance(module, AttentionProduct):
            drop = build.new_module(f"{node.target}_dropout", nn.Dropout(module.dropout))
        replace(node, _decomposed(build, given, drop))
        notes.append(f"decomposed {node.name}")
    return notes


def _decomposed(build: NodeBuilder, given: dict[str, Any], drop: str | None) -> fx.Node:
    q, k, v = (given[name] for name in ("query", "key", "value"))
    size = (shape_of(q) or ())[-1]
    scale = given.get("scale")
    scale = 1.0 / math.sqrt(size) if scale is None else scale
    if given.get("enable_gqa") and (repeats := (shape_of(q) or ())[-3] // (shape_of(k) or ())[-3]) > 1:
        k, v = (build.function(torch.repeat_interleave, t, repeats, dim=-3) for t in (k, v))
    scores = build.function(torch.matmul, q, build.method("transpose", k, -2, -1))
    scores = build.function(operator.mul, scores, scale)
    mask, hides_rows = given.get("attn_mask"), False
    if given.get("is_causal"):
        seen = build.method("tril", build.function(torch.ones_like, scores, dtype=torch.bool))
        scores = build.method("masked_fill", scores, build.function(torch.logical_not, seen), -math.inf)
    elif mask is not None:
        hides_rows = True
        if dtype_of(mask) is torch.bool:
            scores = build.method("masked_fill", scores, build.function(torch.logical_not, mask), -math.inf)
        else:
            scores = build.function(add_mask, scores, mask)
    weights = build.function(F.softmax, scores, dim=-1)
    if hides_rows:
        hidden = build.method("all", build.function(torch.isneginf, scores), dim=-1, keepdim=True)
        weights = build.method("masked_fill", weights, hidden, 0.0)
    if drop is not None:
        weights = build.module(drop, weights)
    elif given.get("dropout_p", 0.0):
        weights = build.function(F.dropout, weights, given["dropout_p"])
    return build.function(torch.matmul, weights, v)
