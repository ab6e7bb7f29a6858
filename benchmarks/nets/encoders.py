"""A ViT and a BERT-like encoder of two blocks in plain torch, random weights."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, BLOCKS = 192, 3, 2


class Block(nn.Module):
    """Attention and two linear layers around residual sums, with the norm before (ViT) or after (BERT) each."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def attend(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (3, B, heads, T, size)
        return self.proj(F.scaled_dot_product_attention(*parts.unbind(), mask).transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x), mask)
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x, mask))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class ViT(nn.Module):
    """Patches of 16 pixels, a class token, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 197, WIDTH))
        self.blocks = nn.ModuleList(Block(norm_first=True) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (B, 196, width)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Bert(nn.Module):
    """Embedded words in, scores of each out; words of number 0 are padding, which a mask hides."""

    def __init__(self, *, masked: bool = True) -> None:
        super().__init__()
        self.masked = masked
        self.words, self.positions = nn.Embedding(1000, WIDTH), nn.Embedding(128, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(norm_first=False) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(words) + self.positions.weight[: words.shape[1]])
        mask = (words != 0)[:, None, None, :] if self.masked else None  # (B, 1, 1, T)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def tokens(batch: int = 1, length: int = 128) -> torch.Tensor:
    """Random words, the last of each row padding."""
    words = torch.randint(1, 1000, (batch, length))
    words[:, -8:] = 0
    return words
