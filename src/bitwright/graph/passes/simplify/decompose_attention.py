"""Take ``scaled_dot_product_attention`` apart, so that a backend can run its products in integers.

    sdpa(q, k, v)  ->  softmax(q·kᵀ·scale + mask) · v,      scale = 1/√d if none is given

Off unless asked for: the parts round differently from torch's fused kernels (about 1e-6 of the values), so a prepared
model would no longer equal the original to the last bit. All arguments are supported: boolean and float masks, rows
that a mask hides completely (zeros), causal, scale, dropout, and grouped queries.
"""

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.graph.build import NodeBuilder
from bitwright.graph.facts import dtype_of, facts, shape_of
from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.attention_parts import AttentionProduct, add_mask

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@register_schedule("decompose_attention", stage="simplify", after="split_attention", default=False, tolerance=1e-5)
class ReplacePattern(ReplacePatternBase):
    """Decompose every attention, from functions and from split modules."""

    done = "decomposed"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("attention", None, [F.scaled_dot_product_attention, AttentionProduct], _has_tensors)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> fx.Node:
        node, module = nodes_dict["attention"], modules_dict["attention"]
        build = NodeBuilder(model, node)
        given = _with_repeated_groups(build, _arguments(node))
        scores, hidden = _scores(build, given)
        weights = build.function(F.softmax, scores, dim=-1)
        if hidden is not None:
            whole = build.method("all", hidden, dim=-1, keepdim=True)
            weights = build.method("masked_fill", weights, whole, 0.0)
        if isinstance(module, AttentionProduct):
            weights = build.module(nn.Dropout(module.dropout), weights, name=f"{node.name}_dropout")
        elif given.get("dropout_p"):
            weights = build.function(F.dropout, weights, given["dropout_p"])
        return build.function(torch.matmul, weights, given["value"])


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = [n for n in _NAMES if n != "dropout_p"] if node.op == "call_module" else _NAMES
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _has_tensors(node: fx.Node, _: object) -> bool | str:
    given = _arguments(node)
    if facts(node).skipped:
        return f"skipped by the rule {facts(node).skipped!r}"
    return all(shape_of(given.get(name)) is not None for name in _NAMES[:3]) or "its inputs are not tensors"


def _scores(build: NodeBuilder, given: dict[str, Any]) -> tuple[fx.Node, fx.Node | None]:
    """q·kᵀ·scale, with -inf where a mask hides it, and where it does if that may be a whole row."""
    scale, size = given.get("scale"), (shape_of(given["query"]) or ())[-1]
    keys = build.method("transpose", given["key"], -2, -1)
    scores = build.function(torch.matmul, given["query"], keys)
    scores = build.function(operator.mul, scores, 1.0 / math.sqrt(size) if scale is None else scale)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        sizes = tuple(build.method("size", scores, dimension) for dimension in (-2, -1))
        later = build.method("triu", build.method("new_ones", scores, sizes, dtype=torch.bool), 1)
        return build.method("masked_fill", scores, later, -math.inf), None
    if mask is None:
        return scores, None
    if dtype_of(mask) is torch.bool:
        hidden = build.function(torch.logical_not, mask)
        return build.method("masked_fill", scores, hidden, -math.inf), hidden
    return build.function(add_mask, scores, mask), build.function(torch.isneginf, mask)


def _with_repeated_groups(build: NodeBuilder, given: dict[str, Any]) -> dict[str, Any]:
    """Repeat keys and values for all queries of a group."""
    q, k = (shape_of(given[name]) or () for name in ("query", "key"))
    if not given.get("enable_gqa") or q[-3] == k[-3]:
        return given
    times = q[-3] // k[-3]
    more = {n: build.function(torch.repeat_interleave, given[n], times, dim=-3) for n in ("key", "value")}
    return {**given, **more}
