"""Parts of split attention that torch has no operators for: sums with masks, and products that drop weights."""

import torch.nn.functional as F
from torch import Tensor, nn


def add_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Add a mask to attention scores; the sum stays float because a mask holds values like -inf."""
    return scores + mask


class AttentionProduct(nn.Module):
    """``F.scaled_dot_product_attention`` that drops weights in training, like ``nn.MultiheadAttention``."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout, is_causal)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"
