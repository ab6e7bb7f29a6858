"""Capture: decoders with a cache, for the prompt and for single tokens, and results that are objects."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import CaptureError
from bitwright.nn import QuantLinear


class Cache:
    """Keys and values of each layer, which grow by what is new."""

    def __init__(self):
        self.keys, self.values = [None, None], [None, None]

    def update(self, key, value, layer):
        if self.keys[layer] is not None:
            key, value = torch.cat([self.keys[layer], key], 2), torch.cat([self.values[layer], value], 2)
        self.keys[layer], self.values[layer] = key, value
        return key, value

    def length(self):
        return 0 if self.keys[0] is None else self.keys[0].shape[2]


class Attention(nn.Module):
    def __init__(self, layer, branches):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.layer, self.branches = layer, branches

    def forward(self, x, cache):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k, v = cache.update(k, v, self.layer)
        causal = x.shape[1] > 1
        if self.branches:
            causal = causal and not self.training
        x = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(x.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, *, branches):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(20, 8), nn.Embedding(32, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(Attention(i, branches) for i in range(2))

    def forward(self, ids, cache):
        start = cache.length()
        x = self.tokens(ids) + self.places(torch.arange(start, start + ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = x + layer(x, cache)
        return self.head(x)

    @torch.no_grad()
    def generate(self, ids, count):
        cache, made = Cache(), ids
        for _ in range(count):
            ids = self(ids, cache)[:, -1:].argmax(-1)
            made = torch.cat([made, ids], 1)
        return made


def examples(model):
    """A prompt with an empty cache, and one token with a full one."""
    ids, cache = torch.randint(0, 20, (1, 5)), Cache()
    with torch.no_grad():
        model(ids, cache)
    return {"prompt": (ids, Cache()), "token": (ids[:, :1], cache)}


@pytest.mark.parametrize("which", ["prompt", "token"])
@pytest.mark.parametrize("branches", [False, True])
def test_a_captured_decoder_generates(which, branches):
    """Where Python decides by the length, the graph holds for one of the two, and says what to do."""
    torch.manual_seed(0)
    model = Decoder(branches=branches).eval()
    example, ids = examples(model)[which], torch.randint(0, 20, (1, 4))
    expected = model.generate(ids, 6)
    if branches:
        with pytest.raises(CaptureError, match=r"or let that module run as written: leaves=\['island:layers\.0'\]"):
            bw.prepare(model, example).generate(ids, 6)
    quantized = bw.prepare(model, example, leaves=["island:layers.*"] if branches else ())
    islands = {f"layers.{i}": "by request: 'island:layers.*'" for i in range(2)}
    assert bw.ledger_of(quantized).islands == (islands if branches else {})
    assert torch.equal(quantized.generate(ids, 6), expected)
    assert all(isinstance(quantized.get_submodule(f"layers.{i}.qkv"), QuantLinear) for i in range(2))


class Output(OrderedDict):
    """A dict with attributes of its own, which forbids to be updated."""

    def __init__(self, **items):
        super().__init__(**items)
        self.note = "mine"

    def update(self, *args, **kwargs):
        if self:
            raise TypeError("an Output is not updated")
        super().update(*args, **kwargs)


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        cache = Cache()
        y = self.fc(x)
        cache.keys = [y, y + 1]
        return Output(logits=y, past=cache, hidden=[y, (x,)])


def test_dicts_of_the_users_class_are_made_again():
    model, x = Returning().eval(), torch.randn(2, 4)
    quantized = bw.prepare(model, x)
    assert bw.ledger_of(quantized).islands == {}
    ours, theirs = quantized(x), model(x)
    assert (type(ours), list(ours), ours.note) == (Output, ["logits", "past", "hidden"], "mine")
    assert torch.equal(ours["logits"], theirs["logits"])
    assert all(map(torch.equal, ours["past"].keys, theirs["past"].keys))
    assert torch.equal(ours["hidden"][1][0], x)
