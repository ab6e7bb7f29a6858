"""QuantMultiheadAttention: nn.MultiheadAttention with quantized inputs and projections."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.nn.mixins import WEIGHT, QuantMixin, TakesDescriptors
from bitwright.nn.recurrent import active
from bitwright.nn.registry import register_qmodule
from bitwright.quantizer import QuantDescriptor, TensorQuantizer

_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@register_qmodule(sources=[nn.MultiheadAttention])
class QuantMultiheadAttention(TakesDescriptors, QuantMixin, nn.MultiheadAttention):
    """nn.MultiheadAttention whose query, key and value and whose projection weights are quantized.

    ``input_quantizer`` serves query, key and value; there is one weight quantizer for the input projection
    (``weight_quantizer``; with kdim or vdim, for each of its three parts) and one for the output projection
    (``out_weight_quantizer``). The attention itself and the input of the output projection stay float. With all
    quantizers off, the original fused operator runs.
    """

    by_default = True
    _out_weight_quantizer: TensorQuantizer

    def init_quantizer(self, *descriptors: QuantDescriptor) -> None:  # pyrefly: ignore
        """Create the quantizers of the inputs and of every existing projection weight."""
        super().init_quantizer(*descriptors)
        for name in ("_k_weight_quantizer", "_v_weight_quantizer"):
            setattr(self, name, None if self._qkv_same_embed_dim else self.build_quantizer(descriptors[1], WEIGHT))
        self._out_weight_quantizer = self.build_quantizer(descriptors[1], WEIGHT)

    @property
    def out_weight_quantizer(self) -> TensorQuantizer:
        return self._out_weight_quantizer

    def _quantizers(self) -> list[Any]:
        own: Any = self
        return [own._weight_quantizer, own._weight_quantizer, own._k_weight_quantizer, own._v_weight_quantizer]

    def _projections(self) -> dict[str, Tensor | None]:
        weights = [getattr(self, name) for name in _WEIGHTS]
        pairs = zip(_WEIGHTS, weights, self._quantizers(), strict=True)
        return {name: None if weight is None else quantizer(weight) for name, weight, quantizer in pairs}

    def stored_weights(self) -> dict[str, Tensor]:
        """The projections' weights by the names of their quantizers."""
        both = {
            "_weight_quantizer": self.in_proj_weight if self._qkv_same_embed_dim else self.q_proj_weight,
            "_k_weight_quantizer": self.k_proj_weight,
            "_v_weight_quantizer": self.v_proj_weight,
            "_out_weight_quantizer": self.out_proj.weight,
        }
        return {name: weight for name, weight in both.items() if weight is not None}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        everything = [self._input_quantizer, self._out_weight_quantizer, *self._quantizers()]
        if not any(q is not None and active(q) for q in everything):
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return nn.MultiheadAttention.forward(self, query, key, value, *options)
        query, key, value = self._quantized(query, key, value)
        if self.batch_first and query.dim() == 3:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        weights = self._projections()
        out, attention = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            weights.pop("in_proj_weight"),
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self._out_weight_quantizer(self.out_proj.weight),
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=not self._qkv_same_embed_dim,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            **weights,
        )
        return out.transpose(0, 1) if self.batch_first and out.dim() == 3 else out, attention

    def _quantized(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.input_quantizer(query)
        second = first if key is query else self.input_quantizer(key)
        if value is key or value is query:
            return first, second, second if value is key else first
        return first, second, self.input_quantizer(value)
