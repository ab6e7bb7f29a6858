"""Multi-head attention written out in graph nodes: projections, scores, softmax, products.

    heads(x, w, b) = split x·wᵀ + b into h heads
    out = join( softmax(q·kᵀ/√d + mask) · v ) · w_outᵀ + b_out

The nodes compute what ``F.multi_head_attention_forward`` does, in its order, over the same parameters.
"""

import math
import operator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from bitwright.graph.build import NodeBuilder
from bitwright.graph.facts import dtype_of, is_floating, shape_of
from bitwright.nn.attention_parts import add_mask


class AttentionBuilder:
    """Writes one call of attention into the graph.

    Sizes in comments: L queries, S keys, N sequences, H heads, D values per head, E = H·D.

    ``given`` has the arguments of ``F.multi_head_attention_forward`` by name, tensors as nodes; also ``batch_first``,
    ``dropout``, the module that drops attention weights while training, if one does, and ``explicit``: write the
    products out, instead of calling ``scaled_dot_product_attention``.
    """

    def __init__(self, build: NodeBuilder, given: dict[str, Any]) -> None:
        self.build, self.call = build, SimpleNamespace(**given)
        shape = shape_of(self.call.query) or (0,)
        self.batched, self.embedding = len(shape) == 3, shape[-1]

    def write(self) -> tuple[fx.Node, fx.Node | None]:
        """Add the nodes; return the result and the attention weights, if they are needed."""
        call, weights = self.call, None
        q, k, v = self._projected(*self._laid_out())  # (L, N, E), (S, N, E), (S, N, E)
        if call.bias_k is not None and call.bias_v is not None:
            k, v = self._with_bias(k, call.bias_k), self._with_bias(v, call.bias_v)
        q, k, v = (self._heads(t) for t in (q, k, v))  # (N·H, L, D), (N·H, S, D), (N·H, S, D)
        if call.add_zero_attn:
            k, v = (self.build.function(F.pad, t, (0, 0, 0, 1)) for t in (k, v))
        if call.explicit:
            joined, weights = self._products(q, k, v, self._mask())
        else:
            joined = self._fused(q, k, v, self._mask())
        out = self.build.function(
            F.linear, joined, call.out_proj_weight, call.out_proj_bias, name=self._name("out_proj")
        )
        return self._given_back(out), self._returned(weights) if call.need_weights else None

    @property
    def _causal_by_itself(self) -> bool:
        """Whether the fused function gets ``is_causal`` instead of a mask."""
        return self.call.is_causal and self.call.key_padding_mask is None and not self.call.explicit

    def _mask(self) -> fx.Node | None:
        """One mask of both: (L, S), or one that goes with (N, H, L, S)."""
        mask = None if self._causal_by_itself else self._as_float(self.call.attn_mask)  # (L, S) or (N·H, L, S)
        padding = self._as_float(self.call.key_padding_mask)  # (N, S)
        if padding is not None and not self.batched:
            padding = self.build.method("unsqueeze", padding, 0)
        for more in (self.call.bias_k is not None, self.call.add_zero_attn):  # one more key, which nothing masks
            mask, padding = (self._one_more(m) if more else m for m in (mask, padding))
        return self._merged(mask, padding)

    def _laid_out(self) -> list[fx.Node]:
        """Query, key and value with the sequence first; what was one tensor in a batch stays one."""
        tensors = [self.call.query, self.call.key, self.call.value]
        if not self.batched:  # always three tensors, so torch projects each of them separately
            return [self.build.method("unsqueeze", tensor, 1) for tensor in tensors]
        if not self.call.batch_first:
            return tensors
        made = {tensor: self.build.method("transpose", tensor, 1, 0) for tensor in dict.fromkeys(tensors)}
        return [made[tensor] for tensor in tensors]

    def _projected(self, query: fx.Node, key: fx.Node, value: fx.Node) -> list[Any]:
        call, size = self.call, self.embedding
        weight, bias, apart = call.in_proj_weight, call.in_proj_bias, call.use_separate_proj_weight
        if not apart and query is key and key is value:
            return self._cut(self._linear(query, weight, bias, "in"), [size] * 3, -1)
        if not apart and key is value:
            (w_q, w_kv), (b_q, b_kv) = (self._cut(t, [size, 2 * size]) for t in (weight, bias))
            return [self._linear(query, w_q, b_q, "q"), *self._cut(self._linear(key, w_kv, b_kv, "kv"), [size] * 2, -1)]
        own = [call.q_proj_weight, call.k_proj_weight, call.v_proj_weight]
        weights, biases = own if apart else self._cut(weight, [size] * 3), self._cut(bias, [size] * 3)
        return [self._linear(*part) for part in zip((query, key, value), weights, biases, "qkv", strict=True)]

    def _linear(self, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None, part: str) -> fx.Node:
        return self.build.function(F.linear, x, weight, bias, name=self._name(f"{part}_proj"))

    def _cut(self, tensor: fx.Node | None, sizes: list[int], dimension: int = 0) -> list[Any]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        if tensor is None:
            return [None] * len(sizes)
        pairs = zip(starts, sizes, strict=True)
        return [self.build.function(torch.narrow, tensor, dimension, start, size) for start, size in pairs]

    def _heads(self, x: fx.Node) -> fx.Node:
        """From (L, N, E) to (N·H, L, D)."""
        size = self.embedding // self.call.num_heads
        apart = self.build.method("unflatten", x, -1, (self.call.num_heads, size))
        return self.build.method("transpose", self.build.method("flatten", apart, 1, 2), 0, 1)

    def _with_bias(self, x: fx.Node, bias: fx.Node) -> fx.Node:
        """(S, N, E) with the learned (1, 1, E) after the last key."""
        like = self.build.method("narrow", x, 0, 0, 1)
        return self.build.function(torch.cat, [x, self.build.method("expand_as", bias, like)])

    def _one_more(self, mask: fx.Node | None) -> fx.Node | None:
        return None if mask is None else self.build.function(F.pad, mask, (0, 1))

    def _as_float(self, mask: fx.Node | None) -> fx.Node | None:
        """0 where a mask lets values pass, else -inf."""
        if mask is None or is_floating(mask):
            return mask
        dtype = dtype_of(self.call.query)
        zeros = self.build.function(torch.zeros_like, mask, dtype=dtype)
        return self.build.method("masked_fill", zeros, mask, -math.inf)

    def _merged(self, mask: fx.Node | None, padding: fx.Node | None) -> fx.Node | None:
        if mask is not None and len(shape_of(mask) or ()) == 3:
            mask = self.build.method("unflatten", mask, 0, (-1, self.call.num_heads))
        if padding is None:
            return mask
        padding = self.build.method("unsqueeze", self.build.method("unsqueeze", padding, 1), 1)  # (N, 1, 1, S)
        return padding if mask is None else self.build.function(add_mask, mask, padding)

    def _products(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None) -> tuple[fx.Node, fx.Node]:
        build, heads = self.build, self.call.num_heads
        scale = math.sqrt(1.0 / (self.embedding // heads))
        scaled = build.function(operator.mul, q, scale)
        weights = build.function(torch.bmm, scaled, build.method("transpose", k, -2, -1))  # (N·H, L, S)
        if mask is not None:
            apart = build.method("unflatten", weights, 0, (-1, heads))
            weights = build.method("flatten", build.function(add_mask, apart, mask), 0, 1)
        weights = build.function(F.softmax, weights, dim=-1)
        if self.call.dropout is not None:
            weights = build.module(self.call.dropout, weights, name=self._name("dropout"))
        out = build.method("transpose", build.function(torch.bmm, weights, v), 0, 1)  # (L, N·H, D)
        return build.method("flatten", build.method("unflatten", out, 1, (-1, heads)), 2), weights

    def _fused(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None) -> fx.Node:
        build, causal = self.build, self._causal_by_itself
        q, k, v = (build.method("unflatten", t, 0, (-1, self.call.num_heads)) for t in (q, k, v))  # (N, H, …, D)
        if self.call.dropout is None:
            out = build.function(F.scaled_dot_product_attention, q, k, v, attn_mask=mask, is_causal=causal)
        else:
            out = build.module(self.call.dropout, q, k, v, mask, causal, name=self._name("product"))
        return build.method("flatten", build.method("permute", out, 2, 0, 1, 3), 2)

    def _given_back(self, out: fx.Node) -> fx.Node:
        """From (L, N, E) to the layout of the query."""
        if not self.batched:
            return self.build.method("squeeze", out, 1)
        return self.build.method("transpose", out, 1, 0) if self.call.batch_first else out

    def _returned(self, weights: fx.Node | None) -> fx.Node | None:
        if weights is None:
            return None
        weights = self.build.method("unflatten", weights, 0, (-1, self.call.num_heads))
        if self.call.average_attn_weights:
            weights = self.build.method("mean", weights, dim=1)
        return weights if self.batched else self.build.method("squeeze", weights, 0)

    def _name(self, part: str) -> str:
        return f"{self.build.scope}_{part}".replace(".", "_").lstrip("_")
