"""Transformers for images: patches, and shifted windows with shape arithmetic and masks."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import member


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, width * 3), nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class Mlp(nn.Module):
    def __init__(self, width, act=nn.GELU):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 2 * width), act(), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@member(size=16, other=24)
class VisionTransformer(nn.Module):
    """Its positions are interpolated to the size of the image."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 16))
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def positions(self, h, w):
        side = int(math.sqrt(self.pos_embed.shape[1] - 1))
        grid = self.pos_embed[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(h, w), mode="bilinear", align_corners=False)
        return torch.cat([self.pos_embed[:, :1], grid.flatten(2).transpose(1, 2)], 1)

    def forward(self, x):
        x = self.patch_embed(x)
        h, w = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions(h, w)
        return self.head(self.norm(self.blocks(x))[:, 0])


def window_partition(x, size):
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, c)


def window_reverse(windows, size, h, w):
    b = windows.shape[0] // (h * w // size // size)
    x = windows.view(b, h // size, w // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, -1)


class WindowAttention(nn.Module):
    def __init__(self, width, size, heads=2):
        super().__init__()
        self.size, self.heads, self.scale = size, heads, (width // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * size - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        relative = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0) + size - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * size - 1) + relative[..., 1])
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        attn = attn + bias.view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            windows = mask.shape[0]
            attn = attn.view(b // windows, windows, self.heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.heads, n, n)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class SwinBlock(nn.Module):
    def __init__(self, width, size=4, shift=0):
        super().__init__()
        self.size, self.shift = size, shift
        self.norm1, self.attn = nn.LayerNorm(width), WindowAttention(width, size)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def shift_mask(self, h, w, device):
        mask = torch.zeros((1, h, w, 1), device=device)
        spans = (slice(0, -self.size), slice(-self.size, -self.shift), slice(-self.shift, None))
        count = 0
        for rows in spans:
            for columns in spans:
                mask[:, rows, columns, :] = count
                count += 1
        windows = window_partition(mask, self.size).view(-1, self.size * self.size)
        difference = windows.unsqueeze(1) - windows.unsqueeze(2)
        return difference.masked_fill(difference != 0, -100.0).masked_fill(difference == 0, 0.0)

    def forward(self, x):
        _, h, w, c = x.shape
        shortcut, x = x, self.norm1(x)
        right, below = (self.size - w % self.size) % self.size, (self.size - h % self.size) % self.size
        x = F.pad(x, (0, 0, 0, right, 0, below))
        _, rows, columns, _ = x.shape
        mask = None
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
            mask = self.shift_mask(rows, columns, x.device)
        windows = self.attn(window_partition(x, self.size).view(-1, self.size * self.size, c), mask=mask)
        x = window_reverse(windows.view(-1, self.size, self.size, c), self.size, rows, columns)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        if right > 0 or below > 0:
            x = x[:, :h, :w, :].contiguous()
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        h, w, _ = x.shape[-3:]
        x = F.pad(x, (0, 0, 0, w % 2, 0, h % 2))
        corners = [x[..., i::2, j::2, :] for j in range(2) for i in range(2)]
        return self.reduction(self.norm(torch.cat(corners, -1)))


@member(size=24, other=40)
class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 2, 2)
        self.layers = nn.ModuleList([SwinBlock(8), SwinBlock(8, shift=2), PatchMerging(8), SwinBlock(16, shift=2)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).flatten(1, 2).mean(1))
