"""Steps on sequences, (samples, places, features): attention, recurrent layers and blocks of transformers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.random_nets.builder import Builder

WORDS = 20


def sequence(b: Builder) -> int:
    """A value with features that heads can share."""
    return b.pick([i for i, v in enumerate(b.values) if v.ndim == 3 and v.is_floating_point() and v.shape[2] % 2 == 0])


def width(b: Builder, x: int) -> int:
    return b.values[x].shape[2]


def embed(b: Builder) -> int:
    """The first step on tokens: their embedding, often with one of their places."""
    features = b.one_of(4, 8, 16)
    words = b.layer(nn.Embedding(WORDS, features, padding_idx=b.one_of(None, 0)))
    if b.flip(0.4):
        return b.add(f"embed {features}", lambda n, v: getattr(n, words)(v), 0)
    places = b.layer(nn.Embedding(4 * b.values[0].shape[1], features))
    return b.add(
        f"embed {features} with places",
        lambda n, v: getattr(n, words)(v) + getattr(n, places)(torch.arange(v.shape[1], device=v.device)),
        0,
    )


def attention(b: Builder) -> None:
    """A module of torch's, of one sequence or of two."""
    x = sequence(b)
    others = [i for i, v in enumerate(b.values) if v.ndim == 3 and v.is_floating_point() and len(v) == len(b.values[x])]
    y = b.rng.choice(others) if b.flip(0.3) else x
    sizes = {"kdim": width(b, y), "vdim": width(b, y)} if y != x else {}
    layer = nn.MultiheadAttention(width(b, x), b.one_of(1, 2), bias=b.flip(0.8), batch_first=True, **sizes)
    name, weights = b.layer(layer), b.flip(0.3)
    b.add(f"{layer} {sizes}", lambda n, u, v: getattr(n, name)(u, v, v, need_weights=weights)[0], x, y)


def written_attention(b: Builder) -> None:
    """Attention as people write it: products and a softmax, or torch's function, with and without a mask."""
    x = sequence(b)
    size, heads, causal = width(b, x), b.one_of(1, 2), b.flip(0.3)
    project, out = b.layer(nn.Linear(size, 3 * size, bias=b.flip())), b.layer(nn.Linear(size, size))
    fused = b.flip()

    def step(n: nn.Module, v: Tensor) -> Tensor:
        samples, places, _ = v.shape
        qkv = getattr(n, project)(v).view(samples, places, 3, heads, size // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if fused:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        else:
            scores = query @ key.transpose(-2, -1) * (size // heads) ** -0.5
            if causal:
                scores = scores + torch.full((places, places), -1e4).triu(1)
            mixed = scores.softmax(-1) @ value
        return getattr(n, out)(mixed.transpose(1, 2).reshape(samples, places, size))

    b.add(f"attention heads {heads} causal {causal} fused {fused}", step, x)


def recurrent(b: Builder) -> None:
    x = sequence(b)
    kind = b.one_of(nn.LSTM, nn.LSTM, nn.GRU, nn.RNN)
    layer = kind(width(b, x), b.one_of(2, 6), b.one_of(1, 1, 2), batch_first=True, bidirectional=b.flip(0.3))
    name, last = b.layer(layer), b.flip(0.2)
    b.add(f"{layer} last {last}", lambda n, v: getattr(n, name)(v)[0][:, -1:] if last else getattr(n, name)(v)[0], x)


def encoder_layer(b: Builder) -> None:
    x = sequence(b)
    settings = {"norm_first": b.flip(), "activation": b.one_of("relu", "gelu"), "batch_first": True}
    layers = b.one_of(1, 1, 2)
    layer = nn.TransformerEncoderLayer(width(b, x), b.one_of(1, 2), b.one_of(8, 12), dropout=0.0, **settings)
    module = layer if layers == 1 else nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    name = b.layer(module)
    b.add(f"encoder {layers} {settings} width {width(b, x)}", lambda n, v: getattr(n, name)(v), x)


def feed_forward(b: Builder) -> None:
    """Two layers with something between them, next to a residual."""
    x = sequence(b)
    size, inner = width(b, x), b.one_of(6, 16)
    up, gate, down = (
        b.layer(nn.Linear(i, o, bias=b.flip(0.7))) for i, o in ((size, inner), (size, inner), (inner, size))
    )
    act = b.one_of(F.relu, F.gelu, F.silu, torch.sigmoid)
    gated, norm = b.flip(0.4), b.layer(nn.LayerNorm(size, elementwise_affine=b.flip(0.8)))
    first = b.flip()

    def step(n: nn.Module, v: Tensor) -> Tensor:
        y = getattr(n, norm)(v) if first else v
        y = act(getattr(n, up)(y)) * getattr(n, gate)(y) if gated else act(getattr(n, up)(y))
        y = v + getattr(n, down)(y)
        return y if first else getattr(n, norm)(y)

    b.add(f"feed forward {inner} {act.__name__} gated {gated} norm first {first}", step, x)


def root_norm(b: Builder) -> None:
    x = sequence(b)
    scale = b.parameter(width(b, x))

    def step(n: nn.Module, v: Tensor) -> Tensor:
        return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5) * (1 + getattr(n, scale).value)

    b.add("root norm", step, x)


def placed(b: Builder) -> None:
    """A parameter next to the sequence: added to every position, or appended as another one."""
    x = sequence(b)
    token = b.parameter(1, 1, width(b, x))
    if b.flip():
        b.add("add token", lambda n, v: v + getattr(n, token).value, x)
    else:
        b.add("join token", lambda n, v: torch.cat([getattr(n, token).value.expand(len(v), -1, -1), v], 1), x)


def joined(b: Builder) -> None:
    """A concatenation of places or features."""
    x = sequence(b)
    axis = b.one_of(1, 2, -1)
    fits = [
        i
        for i, v in enumerate(b.values)
        if v.ndim == 3 and v.is_floating_point() and v.shape[3 - axis % 3] == b.values[x].shape[3 - axis % 3]
    ]
    b.add(f"cat[{axis}]", lambda n, *vs: torch.cat(vs, axis), x, b.rng.choice(fits))


def convolved(b: Builder) -> None:
    """A convolution along the places, with the features turned to channels and back."""
    x = sequence(b)
    groups = b.one_of(1, width(b, x))
    layer = nn.Conv1d(width(b, x), width(b, x), 3, padding=1, groups=groups, bias=b.flip())
    name = b.layer(layer)
    b.add(f"across {layer}", lambda n, v: getattr(n, name)(v.transpose(1, 2)).transpose(1, 2), x)


def chosen(b: Builder) -> None:
    """Some of the places."""
    x = sequence(b)
    name, function = b.one_of(
        ("first place", lambda v: v[:, 0]),
        ("first places", lambda v: v[:, :2]),
        ("all but the first", lambda v: v[:, 1:]),
        ("mean of places", lambda v: v.mean(1)),
        ("largest of places", lambda v: v.max(1).values),
        ("half of the features", lambda v: v.chunk(2, -1)[1]),
        ("shifted", lambda v: F.pad(v, (0, 0, 1, -1))),
        ("heads", lambda v: v.reshape(*v.shape[:2], 2, -1).transpose(1, 2)),
        ("hidden", lambda v: v.masked_fill(v > 1.0, 0.0)),
    )
    b.add(name, lambda n, v: function(v), x)
