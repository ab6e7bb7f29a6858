"""Transformers for text: an encoder with masks, and a decoder with a cache and an output class."""

import math
from collections import OrderedDict
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import member


class Output(OrderedDict):
    """A result that is a dict and has attributes, without what is None."""

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@dataclass
class EncoderOutput(Output):
    last_hidden_state: torch.Tensor = None
    pooler_output: torch.Tensor | None = None
    attentions: tuple | None = None


@dataclass
class DecoderOutput(Output):
    logits: torch.Tensor = None
    past_key_values: tuple | None = None


class SelfAttention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def split(self, x):
        return x.view(x.size()[:-1] + (self.heads, self.size)).permute(0, 2, 1, 3)  # noqa: RUF005

    def forward(self, x, mask=None, output_attentions=False):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.size)
        scores = scores if mask is None else scores + mask
        weights = F.softmax(scores, dim=-1)
        out = (weights @ v).permute(0, 2, 1, 3).contiguous()
        out = out.view(*out.size()[:-2], self.heads * self.size)
        return (out, weights) if output_attentions else (out,)


class EncoderLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention, self.dense, self.norm1 = SelfAttention(width), nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down, self.norm2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x, mask, output_attentions=False):
        attended = self.attention(x, mask, output_attentions)
        x = self.norm1(x + self.dense(attended[0]))
        return (self.norm2(x + self.down(F.gelu(self.up(x)))), *attended[1:])


def masked_text(batch, length):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return {"input_ids": torch.randint(0, 50, (batch, length)), "attention_mask": mask}


@member(masked_text, 6, 9)
class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place, self.kind = nn.Embedding(50, 16, 0), nn.Embedding(12, 16), nn.Embedding(2, 16)
        self.norm, self.layer = nn.LayerNorm(16), nn.ModuleList([EncoderLayer(16) for _ in range(2)])
        self.pooler = nn.Linear(16, 16)
        self.register_buffer("position_ids", torch.arange(12).expand((1, -1)), persistent=False)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, output_attentions=None, return_dict=True):
        output_attentions = output_attentions if output_attentions is not None else True
        batch, length = input_ids.size()
        if attention_mask is None:
            attention_mask = torch.ones((batch, length), device=input_ids.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros(input_ids.size(), dtype=torch.long, device=input_ids.device)
        x = self.word(input_ids) + self.kind(token_type_ids) + self.place(self.position_ids[:, :length])
        x = self.norm(x)
        mask = attention_mask[:, None, None, :].to(dtype=x.dtype)
        mask = (1.0 - mask) * torch.finfo(x.dtype).min
        attentions = () if output_attentions else None
        for layer in self.layer:
            outputs = layer(x, mask, output_attentions)
            x = outputs[0]
            if output_attentions:
                attentions = (*attentions, outputs[1])
        pooled = torch.tanh(self.pooler(x[:, 0]))
        if not return_dict:
            return x, pooled
        return EncoderOutput(last_hidden_state=x, pooler_output=pooled, attentions=attentions)


class CausalAttention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads, self.width = heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("causal", torch.tril(torch.ones(32, 32, dtype=torch.bool))[None, None], persistent=False)

    def forward(self, x, layer_past=None, use_cache=False):
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.c_attn(x).split(self.width, 2)
        )
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), dim=-2), torch.cat((layer_past[1], v), dim=-2)
        present = (k, v) if use_cache is True else None
        n = k.size(-2)
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
        lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        scores = torch.where(self.causal[:, :, n - t : n, :n], scores, lowest)
        out = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, c)
        return self.c_proj(out), present


class DecoderBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), CausalAttention(width), nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 2 * width), "c_proj": nn.Linear(2 * width, width)})

    def forward(self, x, layer_past=None, use_cache=False):
        out, present = self.attn(self.ln_1(x), layer_past=layer_past, use_cache=use_cache)
        x = x + out
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")), present


class DecoderBase(nn.Module):
    """A decoder whose head shares the embedding's weight, and which generates."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.h = nn.ModuleList([DecoderBlock(16) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        past_length = 0 if past_key_values is None else past_key_values[0][0].size(-2)
        past_key_values = [None] * len(self.h) if past_key_values is None else past_key_values
        places = torch.arange(past_length, input_ids.shape[-1] + past_length, device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(places.unsqueeze(0))
        presents = () if use_cache else None
        for block, layer_past in zip(self.h, past_key_values, strict=True):
            x, present = block(x, layer_past, use_cache)
            if use_cache:
                presents = (*presents, present)
        return DecoderOutput(logits=self.lm_head(self.ln_f(x)), past_key_values=presents)

    @torch.no_grad()
    def generate(self, ids, count):
        for _ in range(count):
            ids = torch.cat([ids, self(ids).logits[:, -1:].argmax(-1)], 1)
        return ids


def token_ids(batch, length):
    return {"input_ids": torch.randint(0, 50, (batch, length))}


def with_past(batch, length):
    past = [tuple(torch.randn(batch, 2, length, 8) for _ in range(2)) for _ in range(2)]
    return {"input_ids": torch.randint(0, 50, (batch, 1)), "past_key_values": past}


@member(token_ids, 5, 8)
class Gpt(DecoderBase):
    """The first call, with all tokens and no cache."""


@member(with_past, 5, 8)
class GptStep(DecoderBase):
    """A later call: one token, and the cache of those before."""
