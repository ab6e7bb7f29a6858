"""Steps without a weight: activations, arithmetic, moves and reductions."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.random_nets.builder import Builder

Function = Callable[[Tensor], Tensor]

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    lambda: nn.Hardtanh(-0.3, 0.7),
    lambda: nn.LeakyReLU(0.1),
    lambda: nn.LeakyReLU(-0.5),
    nn.Sigmoid,
    nn.Tanh,
    nn.SiLU,
    nn.GELU,
    lambda: nn.GELU("tanh"),
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.ELU,
    lambda: nn.ELU(0.5),
    nn.CELU,
    nn.SELU,
    nn.PReLU,
    nn.Mish,
    nn.Softplus,
    lambda: nn.Softplus(2.0, 1.0),
    nn.LogSigmoid,
    nn.Softsign,
    lambda: nn.Softshrink(0.2),
    lambda: nn.Hardshrink(0.2),
    lambda: nn.Threshold(0.1, -0.2),
    lambda: nn.Softmax(-1),
    lambda: nn.Softmax(1),
    lambda: nn.LogSoftmax(1),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.SiLU(inplace=True),
]

FUNCTIONS: list[tuple[str, Function]] = [
    ("F.relu", F.relu),
    ("F.relu_", lambda v: F.relu(v, inplace=True)),
    (".relu()", lambda v: v.relu()),
    ("F.relu6", F.relu6),
    ("F.leaky_relu", lambda v: F.leaky_relu(v, 0.2)),
    ("F.hardtanh", lambda v: F.hardtanh(v, -0.5, 2.0)),
    (".sigmoid()", lambda v: v.sigmoid()),
    ("F.softmax", lambda v: F.softmax(v, dim=-1)),
    ("F.normalize", lambda v: F.normalize(v, dim=1)),
    ("F.glu", lambda v: F.glu(v, dim=1)),
    ("dropout", lambda v: F.dropout(v, 0.5, training=False)),
]


def activation(b: Builder) -> None:
    x = b.pick(list(range(1, len(b.values))))
    if b.flip(0.6):
        b.call(b.rng.choice(ACTIVATIONS)(), x)
    else:
        text, function = b.rng.choice(FUNCTIONS)
        b.add(text, lambda n, v: function(v), x)


def nothing(b: Builder) -> None:
    """Zeros that no constant folding can see."""
    b.add("zeros", lambda n, v: v.clamp(max=0.0).relu(), b.any())


def clamp(b: Builder) -> None:
    low, high = b.one_of((0.0, None), (None, 1.0), (-0.5, 0.5), (0.2, 1.5), (-2.0, -0.1))
    b.add(f"clamp[{low}, {high}]", lambda n, v: v.clamp(low, high), b.pick(list(range(1, len(b.values)))))


BINARY: list[tuple[str, Callable[..., Tensor]]] = [
    ("add", torch.add),
    ("add", torch.add),
    ("sub", torch.sub),
    ("mul", torch.mul),
    ("max", torch.maximum),
    ("min", torch.minimum),
]


def binary(b: Builder) -> None:
    x = b.any()
    shape = b.values[x].shape
    fits = [i for i, v in enumerate(b.values) if v.shape == shape or _broadcasts(v.shape, shape)]
    name, function = b.rng.choice(BINARY)
    if name == "add" and b.flip(0.2):
        b.add("add alpha=2", lambda n, u, v: torch.add(u, v, alpha=2), x, b.rng.choice(fits))
    else:
        b.add(name, lambda n, u, v: function(u, v), x, b.rng.choice(fits))


def _broadcasts(small: torch.Size, large: torch.Size) -> bool:
    return len(small) == len(large) and all(s in (1, n) for s, n in zip(small, large, strict=True))


def constant(b: Builder) -> None:
    x = b.any()
    number = b.one_of(0.5, -2.0, 3.0)
    name, function = b.one_of(("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div))
    if b.flip() and b.values[x].ndim == b.rank + 2:
        held = b.parameter(b.values[x].shape[1], *(1 for _ in range(b.rank)))
        b.add(f"{name} parameter", lambda n, v: function(v, getattr(n, held).value.abs() + 0.5), x)
    elif b.flip():
        b.add(f"{number} {name}", lambda n, v: function(torch.full_like(v, number), v.abs() + 1), x)
    else:
        b.add(f"{name} {number}", lambda n, v: function(v, number), x)


def concat(b: Builder) -> None:
    x = b.image()
    rank = b.rank + 2
    axis = b.one_of(1, 1, 1, 2, rank - 1, -1, 1 - rank)
    size = _without(b.values[x], axis)
    fits = [i for i in b.images() if _without(b.values[i], axis) == size]
    others = [b.rng.choice(fits) for _ in range(b.one_of(1, 2))]
    b.add(f"cat[{axis}]", lambda n, *vs: torch.cat(vs, axis), x, *others)


def _without(value: Tensor, axis: int) -> list[int]:
    return [s for i, s in enumerate(value.shape) if i != axis % value.ndim]


def stack(b: Builder) -> None:
    x = b.image()
    fits = [i for i in b.images() if b.values[i].shape == b.values[x].shape]
    b.add("stack.sum", lambda n, *vs: torch.stack(vs, 2).flatten(1, 2), x, b.rng.choice(fits))


def move(b: Builder) -> None:
    x = b.image()
    channels = b.values[x].shape[1]
    last = tuple(range(2, b.rank + 2))
    moves: list[tuple[str, Function]] = [
        ("flip rows", lambda v: v.flip(2)),
        ("transpose", lambda v: v.transpose(1, -1)),
        ("transpose rows", lambda v: v.transpose(2, -1)),
        ("permute", lambda v: v.permute(0, *last, 1)),
        ("rows", lambda v: v[:, :, 1:]),
        ("one row", lambda v: v[:, :, 0]),
        ("last rows", lambda v: v[:, :, -3:-1]),
        ("every second", lambda v: v[..., ::2]),
        ("narrow", lambda v: v.narrow(2, 1, 2)),
        ("channels", lambda v: v[:, : max(channels // 2, 1)]),
        ("index_select", lambda v: v.index_select(1, torch.tensor([0, channels - 1]))),
        ("flatten", lambda v: v.flatten(2)),
        ("reshape", lambda v: v.reshape(v.shape[0], channels, -1)),
        ("view back", lambda v: v.contiguous().view(v.shape[0], -1).view(v.shape)),
        ("shuffle", lambda v: v.reshape(v.shape[0], 2, -1, *v.shape[2:]).transpose(1, 2).flatten(1, 2)),
        ("chunk", lambda v: v.chunk(2, 1)[-1]),
        ("split", lambda v: torch.split(v, 1, 2)[0]),
        ("unbind", lambda v: v.unbind(2)[-1]),
        ("split and swap", lambda v: torch.cat(v.chunk(2, 1)[::-1], 1)),
        ("roll", lambda v: v.roll(1, 2)),
        ("repeat", lambda v: v.repeat(1, 2, *(1 for _ in last))),
        ("expand", lambda v: v.mean(last, keepdim=True).expand(-1, -1, *(2 for _ in last))),
        ("unsqueeze", lambda v: v.unsqueeze(1).squeeze(1)),
    ]
    name, function = b.rng.choice(moves)
    if name == "shuffle" and channels % 2:
        raise ValueError("odd channels")
    b.add(name, lambda n, v: function(v), x)


def reduce(b: Builder) -> None:
    last = tuple(range(2, b.rank + 2))
    functions: list[tuple[str, Function]] = [
        ("mean", lambda v: v.mean(last, keepdim=True)),
        ("mean away", lambda v: v.mean(last)),
        ("mean channels", lambda v: v.mean(1, keepdim=True)),
        ("sum", lambda v: v.sum(-1, keepdim=True)),
        ("amax", lambda v: v.amax(2, keepdim=True)),
        ("max", lambda v: v.max(1, keepdim=True).values),
    ]
    name, function = b.rng.choice(functions)
    b.add(name, lambda n, v: function(v), b.image())


def product(b: Builder) -> None:
    x = b.pick([i for i, v in enumerate(b.values) if v.ndim >= 3 and v.shape[-1] < 64 and v.shape[-2] < 64])
    b.add("matmul transposed", lambda n, v: torch.matmul(v, v.transpose(-1, -2)), x)
