"""Split attention into what can be quantized: projections, products and softmax, as graph nodes.

    attention(query, key, value)  ->  linear, bmm, softmax, bmm, linear      (see ``attention.py``)

It finds ``nn.MultiheadAttention`` and ``F.multi_head_attention_forward``. The nodes read the module's own
parameters, so names and the ``state_dict`` do not change. The result is the same bit for bit, in the order that torch
computes it: where it returns weights or takes its fast path, the products are written out; elsewhere it calls
``scaled_dot_product_attention``, and so does the graph (``decompose_attention`` can take that apart). Only the native
kernel of the fast path, for self-attention in evaluation without gradients, may round differently (about 1e-7). While
training, weights are dropped as before.
"""

import inspect
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from bitwright.graph.build import NodeBuilder
from bitwright.graph.facts import is_floating, shape_of
from bitwright.graph.match import MatcherNode
from bitwright.graph.passes.attention import AttentionBuilder
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.attention_parts import AttentionProduct
from bitwright.torch_internals import has_hooks

_TENSORS = ("query", "key", "value", "key_padding_mask", "attn_mask")
_OPTIONS = ("need_weights", "average_attn_weights", "is_causal", "num_heads", "add_zero_attn")
_MODULE, _FUNCTION = (inspect.signature(f) for f in (nn.MultiheadAttention.forward, F.multi_head_attention_forward))
_PROJECTION = type(nn.MultiheadAttention(2, 1).out_proj)


@register_schedule("split_attention", stage="simplify", after="remove_identity", tolerance=1e-5)
class ReplacePattern(ReplacePatternBase):
    """Split every attention, and say why those with hooks or unusual inputs stay whole."""

    done = "split"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("attention", None, [nn.MultiheadAttention, F.multi_head_attention_forward], _may_be_split)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> Any:
        node, called = nodes_dict["attention"], modules_dict["attention"]
        given = _arguments(node)
        if isinstance(called, nn.MultiheadAttention):
            build = NodeBuilder(model, node, scope=str(node.target))
            given |= _of_module(build, called, given)
        else:
            build = NodeBuilder(model, node)
            given |= {"batch_first": False, "dropout": None, "explicit": given["need_weights"]}
        self.note(f"split {node.target if node.op == 'call_module' else node.name} into projections and products")
        return AttentionBuilder(build, given).write()


def _arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, with the defaults."""
    if node.op == "call_module":
        bound = _MODULE.bind(None, *node.args, **node.kwargs)
    else:
        bound = _FUNCTION.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _may_be_split(node: fx.Node, called: Any) -> bool | str:
    given = _arguments(node)
    needed = [name for name in _TENSORS if name in _TENSORS[:3] or given[name] is not None]
    if unknown := [name for name in needed if shape_of(given[name]) is None]:
        return f"its {unknown[0]} is not a tensor"
    if any(isinstance(given.get(name), fx.Node) for name in _OPTIONS):
        return "its options are computed"
    return _module_may_be_split(called) if node.op == "call_module" else _function_may_be_split(given)


def _function_may_be_split(given: dict[str, Any]) -> bool | str:
    if given["training"] is not False and given["dropout_p"] != 0:
        return "it is active in evaluation too"
    return (given["static_k"] is None and given["static_v"] is None) or "its keys or values are passed in already"


def _module_may_be_split(module: nn.MultiheadAttention) -> bool | str:
    if type(module) is not nn.MultiheadAttention:
        return False
    if has_hooks(module) or has_hooks(module.out_proj):
        return "it has hooks"
    return type(module.out_proj) is _PROJECTION or "its output projection was replaced"


def _of_module(build: NodeBuilder, module: nn.MultiheadAttention, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the module itself passes to the function, and how its products are computed."""

    def read(name: str) -> Any:
        owner, _, last = name.rpartition(".")
        return None if getattr(module.get_submodule(owner), last) is None else build.attribute(f"{build.scope}.{name}")

    explicit = given["need_weights"] or _takes_fast_path(module, given)
    dropping = nn.Dropout if explicit else AttentionProduct
    packed = module._qkv_same_embed_dim
    names = ("in_proj_weight",) if packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return {
        **dict.fromkeys(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")),
        **{name: read(name) for name in ("bias_k", "bias_v", *names, "in_proj_bias")},
        "out_proj_weight": read("out_proj.weight"),
        "out_proj_bias": read("out_proj.bias"),
        "use_separate_proj_weight": not packed,
        "num_heads": module.num_heads,
        "add_zero_attn": module.add_zero_attn,
        "batch_first": module.batch_first,
        "dropout": dropping(module.dropout) if module.dropout > 0 else None,
        "explicit": explicit,
    }


def _takes_fast_path(module: nn.MultiheadAttention, given: dict[str, Any]) -> bool:
    """Whether torch evaluates this call with its native kernel, which multiplies like the written-out products."""
    tensors = {given[name] for name in _TENSORS[:3]}
    return all(
        (
            len(tensors) == 1 and len(shape_of(given["query"]) or ()) == 3,
            not is_floating(given["key_padding_mask"]) and not is_floating(given["attn_mask"]),
            module.bias_k is None and not module.add_zero_attn and module.in_proj_bias is not None,
            module._qkv_same_embed_dim and module.batch_first and module.num_heads % 2 == 0,
        )
    )
