"""Split multi-head attention into parts that can be quantized: projections, products and softmax, as graph nodes.

    attention(query, key, value)  ->  linear, bmm, softmax, bmm, linear      (see ``attention.py``)

It is found as ``nn.MultiheadAttention`` and as ``F.multi_head_attention_forward``. The nodes read the module's own
parameters, so names and the ``state_dict`` stay as they are. The result is the same bit for bit, in the order in which
torch computes: where it returns weights or takes its fast path, the products are written out; elsewhere it calls
``scaled_dot_product_attention``, and so does the graph (``decompose_attention`` can take that apart). Only the native
kernel of the fast path, for self-attention in evaluation without gradients, may round otherwise (about 1e-7). While
training, weights are dropped as before.
"""

import inspect
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from bitwright.graph.build import NodeBuilder, has_hooks, module_of, replace
from bitwright.graph.facts import is_floating, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.passes.attention import Attention, AttentionBuilder
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.attention_parts import AttentionProduct

_ARGUMENTS = (
    *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal"),
)
_DEFAULTS = {"need_weights": True, "average_attn_weights": True, "is_causal": False}
_SAME = ("bias_k", "bias_v", "add_zero_attn", "key_padding_mask", "attn_mask", "need_weights", "is_causal")
_TENSORS = ("query", "key", "value", "key_padding_mask", "attn_mask")


@register_schedule("split_attention", stage="simplify", after="remove_identity", tolerance=1e-5)
def split_attention(model: CapturedModel) -> list[str]:
    """Split every attention module, and say why those with hooks or unusual inputs stay whole."""
    notes = []
    for node in list(model.graph.nodes):
        if node.target is F.multi_head_attention_forward:
            notes.append(_split_function(model, node))
            continue
        module = module_of(node, model)
        if type(module) is not nn.MultiheadAttention:
            continue
        given: dict[str, Any] = {**_DEFAULTS, **dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
        if reason := _why_not(module, given):
            notes.append(f"not split: {node.target}, {reason}")
            continue
        target = str(node.target)
        build = NodeBuilder(model, node, scope=target)
        out, weights = AttentionBuilder(build, _describe(build, module, given, target)).write()
        _replace_parts(node, (out, weights))
        notes.append(f"split {target} into projections and products")
    return notes


def _split_function(model: CapturedModel, node: fx.Node) -> str:
    """Split one call of the function, and tell; or tell why not."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["training"] is not False and given["dropout_p"] != 0:
        return f"not split: {node.name}, it drops in evaluation too"
    if given["static_k"] is not None or given["static_v"] is not None:
        return f"not split: {node.name}, its keys or values are given already"
    options = ("num_heads", "need_weights", "average_attn_weights", "is_causal", "add_zero_attn")
    if any(isinstance(given[name], fx.Node) for name in options):
        return f"not split: {node.name}, its options are computed"
    if any(shape_of(given[name]) is None for name in _TENSORS[:3]):
        return f"not split: {node.name}, its inputs are no tensors"
    separate = tuple(given[f"{x}_proj_weight"] for x in "qkv") if given["use_separate_proj_weight"] else None
    call = Attention(
        *(given[name] for name in ("query", "key", "value")),
        heads=given["num_heads"],
        in_weight=None if separate else given["in_proj_weight"],
        separate_weights=separate,  # pyrefly: ignore
        in_bias=given["in_proj_bias"],
        out_weight=given["out_proj_weight"],
        out_bias=given["out_proj_bias"],
        average_weights=given["average_attn_weights"],
        explicit=given["need_weights"],
        **{name: given[name] for name in _SAME},
    )
    _replace_parts(node, AttentionBuilder(NodeBuilder(model, node), call).write())
    return f"split {node.name} into projections and products"


def _why_not(module: nn.MultiheadAttention, given: dict[str, Any]) -> str | None:
    if has_hooks(module) or has_hooks(module.out_proj):
        return "it has hooks"
    for name in _TENSORS:
        value = given.get(name)
        if value is not None and shape_of(value) is None:
            return f"its {name} is no tensor"
    if any(isinstance(given[name], fx.Node) for name in _DEFAULTS):
        return "its options are computed"
    if type(module.out_proj) is not type(nn.MultiheadAttention(2, 1).out_proj):
        return "its output projection was replaced"
    return None


def _describe(build: NodeBuilder, module: nn.MultiheadAttention, given: dict[str, Any], target: str) -> Attention:
    def read(name: str, owner: nn.Module = module) -> Any:
        path = target if owner is module else f"{target}.out_proj"
        return None if getattr(owner, name) is None else build.attribute(f"{path}.{name}")

    explicit = given["need_weights"] or _takes_fast_path(module, given)
    dropout = None
    if module.dropout > 0:
        dropping = nn.Dropout(module.dropout) if explicit else AttentionProduct(module.dropout)
        dropout = build.new_module(f"{target}.attention_dropout" if explicit else f"{target}.product", dropping)
    packed = module._qkv_same_embed_dim
    return Attention(
        *(given[name] for name in ("query", "key", "value")),
        heads=module.num_heads,
        in_weight=read("in_proj_weight") if packed else None,
        separate_weights=None if packed else tuple(read(f"{x}_proj_weight") for x in "qkv"),  # pyrefly: ignore
        in_bias=read("in_proj_bias"),
        out_weight=read("weight", module.out_proj),
        out_bias=read("bias", module.out_proj),
        bias_k=read("bias_k"),
        bias_v=read("bias_v"),
        add_zero_attn=module.add_zero_attn,
        batch_first=module.batch_first,
        key_padding_mask=given.get("key_padding_mask"),
        attn_mask=given.get("attn_mask"),
        need_weights=given["need_weights"],
        average_weights=given["average_attn_weights"],
        is_causal=given["is_causal"],
        dropout=dropout,
        explicit=explicit,
    )


def _takes_fast_path(module: nn.MultiheadAttention, given: dict[str, Any]) -> bool:
    """Whether torch evaluates this call with its native kernel, which multiplies as the written-out products do."""
    one = given["query"] is given["key"] and given["key"] is given["value"]
    masks = [given.get(name) for name in ("key_padding_mask", "attn_mask")]
    plain = not any(m is not None and is_floating(m) for m in masks)
    own = module.bias_k is None and not module.add_zero_attn and module.in_proj_bias is not None
    packed = module._qkv_same_embed_dim and module.batch_first and module.num_heads % 2 == 0
    return one and plain and own and packed and len(shape_of(given["query"]) or ()) == 3


def _replace_parts(node: fx.Node, parts: tuple[fx.Node, fx.Node | None]) -> None:
    """Give each reader of the call's result its part; who reads both gets both."""
    for user in list(node.users):
        index = user.args[1] if user.op == "call_function" and len(user.args) == 2 and user.args[0] is node else None
        if isinstance(index, int) and not isinstance(index, bool):
            replace(user, parts[index])
    replace(node, parts)
