"""Random nets: small graphs drawn from all operators with all their arguments, for tests that look for the unexpected.

``random_net(seed)`` gives a module and an input. The same seed always gives the same net, and its ``repr`` shows every
step, so that a failure can be read and cut down by hand.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = tuple[str, Callable[..., Any], tuple[int, ...]]


class RandomNet(nn.Module):
    """Runs its steps one after the other; each reads values made before it."""

    def __init__(self, layers: dict[str, nn.Module], steps: list[Step], outputs: list[int]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.steps, self.outputs = steps, outputs

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for _, step, reads in self.steps:
            values.append(step(self, *(values[i] for i in reads)))
        results = tuple(values[i] for i in self.outputs)
        return results if len(results) > 1 else results[0]

    def extra_repr(self) -> str:
        lines = [
            f"v{i + 1} = {text}({', '.join(f'v{r}' for r in reads)})" for i, (text, _, reads) in enumerate(self.steps)
        ]
        return "\n".join([*lines, f"return {', '.join(f'v{i}' for i in self.outputs)}"])


@dataclass
class Builder:
    """Draws one net."""

    rng: random.Random
    layers: dict[str, nn.Module] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def layer(self, module: nn.Module) -> str:
        name = f"layer{len(self.layers)}"
        self.layers[name] = module
        return name

    def parameter(self, *shape: int) -> str:
        holder = nn.Module()
        holder.value = nn.Parameter(torch.randn(*shape) * 0.3)
        return self.layer(holder)

    def add(self, text: str, step: Callable[..., Any], *reads: int) -> None:
        """Add a step if it runs, gives one finite tensor that is not empty, and is not too large."""
        net = RandomNet(self.layers, [], [0]).eval()
        with torch.no_grad():
            value = step(net, *(self.values[i] for i in reads))
        if value.numel() == 0 or value.numel() > 40_000 or not bool(torch.isfinite(value).all()):
            raise ValueError("not a useful step")
        self.steps.append((text, step, reads))
        self.values.append(value)

    def call(self, module: nn.Module, *reads: int) -> None:
        name = self.layer(module)
        self.add(f"{module!r}", lambda net, *xs, n=name: getattr(net, n)(*xs), *reads)

    def images(self) -> list[int]:
        return [i for i, v in enumerate(self.values) if v.ndim == 4]

    def pick(self, among: list[int]) -> int:
        """A value, most often a late one."""
        if not among:
            raise ValueError("nothing to read")
        return among[-1] if self.rng.random() < 0.7 else self.rng.choice(among)


def _flip(b: Builder, likely: float = 0.5) -> bool:
    return b.rng.random() < likely


def conv(b: Builder) -> None:
    x = b.pick(b.images())
    channels = b.values[x].shape[1]
    groups = b.rng.choice([g for g in (1, 2, channels) if channels % g == 0])
    out = groups * b.rng.choice([1, 2, 3])
    kernel = b.rng.choice([1, 2, 3, (1, 3), (3, 2)])
    padding = b.rng.choice([0, 1, (1, 0), "same", "valid"])
    stride = 1 if padding == "same" else b.rng.choice([1, 2, (2, 1)])
    mode = b.rng.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
    dilation = b.rng.choice([1, 1, 2])
    module = nn.Conv2d(channels, out, kernel, stride, padding, dilation, groups, bias=_flip(b), padding_mode=mode)
    b.call(module, x)


def functional_conv(b: Builder) -> None:
    x = b.pick(b.images())
    channels = b.values[x].shape[1]
    weight, bias = b.parameter(channels + 1, channels, 3, 3), b.parameter(channels + 1)
    text = "F.conv2d"
    if _flip(b):
        b.add(text, lambda n, v: F.conv2d(v, getattr(n, weight).value, getattr(n, bias).value, padding=1), x)
    else:
        b.add(text, lambda n, v: F.conv2d(v, getattr(n, weight).value, stride=2, padding=(1, 0)), x)


def deconv(b: Builder) -> None:
    x = b.pick(b.images())
    channels = b.values[x].shape[1]
    groups = b.rng.choice([g for g in (1, 2) if channels % g == 0])
    stride = b.rng.choice([1, 2])
    extra = b.rng.choice([0, 1]) if stride > 1 else 0
    out = groups * b.rng.choice([1, 2])
    module = nn.ConvTranspose2d(channels, out, b.rng.choice([2, 3]), stride, 0, extra, groups, _flip(b), 1)
    b.call(module, x)


def conv_norm(b: Builder) -> None:
    conv(b)
    norm = nn.BatchNorm2d(b.values[-1].shape[1])
    with torch.no_grad():
        for tensor, low, high in ((norm.weight, -1.5, 1.5), (norm.bias, -1, 1), (norm.running_mean, -0.5, 0.5)):
            tensor.uniform_(low, high)
        norm.running_var.uniform_(0.2, 2)
    b.call(norm, len(b.values) - 1)
    if _flip(b):
        b.call(nn.ReLU(), len(b.values) - 1)


def linear(b: Builder) -> None:
    x = b.pick(list(range(len(b.values))))
    features = b.values[x].shape[-1]
    if b.values[x].ndim < 2 or features > 512:
        raise ValueError("no features")
    b.call(nn.Linear(features, b.rng.choice([3, 5, 8]), bias=_flip(b, 0.7)), x)


def flat_linear(b: Builder) -> None:
    x = b.pick(b.images())
    if b.values[x][0].numel() > 2048:
        raise ValueError("too many features")
    b.call(nn.Sequential(nn.Flatten(), nn.Linear(b.values[x][0].numel(), b.rng.choice([4, 7]))), x)


ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    lambda: nn.LeakyReLU(0.1),
    nn.Sigmoid,
    nn.Tanh,
    nn.SiLU,
    nn.GELU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.ELU,
    nn.PReLU,
    nn.Mish,
    nn.Softplus,
    lambda: nn.Softmax(-1),
    lambda: nn.ReLU(inplace=True),
]


def activation(b: Builder) -> None:
    b.call(b.rng.choice(ACTIVATIONS)(), b.pick(list(range(1, len(b.values)))))


def clamp(b: Builder) -> None:
    low, high = b.rng.choice([(0.0, None), (None, 1.0), (-0.5, 0.5), (0.2, 1.5), (-2.0, -0.1)])
    b.add(f"clamp[{low}, {high}]", lambda n, v: v.clamp(low, high), b.pick(list(range(1, len(b.values)))))


def binary(b: Builder) -> None:
    x = b.pick(list(range(len(b.values))))
    same = [i for i, v in enumerate(b.values) if v.shape == b.values[x].shape]
    name, function = b.rng.choice([("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("max", torch.maximum)])
    b.add(name, lambda n, u, v: function(u, v), x, b.rng.choice(same))


def constant(b: Builder) -> None:
    x = b.pick(list(range(len(b.values))))
    number = b.rng.choice([0.5, -2.0, 3.0])
    name, function = b.rng.choice([("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div)])
    if _flip(b) and b.values[x].ndim == 4:
        held = b.parameter(b.values[x].shape[1], 1, 1)
        b.add(f"{name} parameter", lambda n, v: function(v, getattr(n, held).value.abs() + 0.5), x)
    elif _flip(b):
        b.add(f"{number} {name}", lambda n, v: function(torch.full_like(v, number), v.abs() + 1), x)
    else:
        b.add(f"{name} {number}", lambda n, v: function(v, number), x)


def concat(b: Builder) -> None:
    x = b.pick(b.images())
    axis = b.rng.choice([1, 1, 2, 3, -1])
    size = list(b.values[x].shape)
    size[axis] = -1
    fits = [i for i in b.images() if [*b.values[i].shape[:axis], -1, *b.values[i].shape[axis % 4 + 1 :]] == size]
    others = [b.rng.choice(fits or [x]) for _ in range(b.rng.choice([1, 2]))]
    b.add(f"cat[{axis}]", lambda n, *vs: torch.cat(vs, axis), x, *others)


def max_pool(b: Builder) -> None:
    kernel, stride, padding = b.rng.choice([(2, 2, 0), (3, 2, 1), (2, 2, 1), (3, 1, 1), ((2, 3), (1, 2), (1, 0))])
    b.call(nn.MaxPool2d(kernel, stride, padding, b.rng.choice([1, 1, 2]), ceil_mode=_flip(b)), b.pick(b.images()))


def average_pool(b: Builder) -> None:
    kernel, stride, padding = b.rng.choice([(2, 2, 0), (3, 2, 1), (2, 1, 1), ((2, 3), 2, (1, 0)), (3, 3, 0)])
    divisor = b.rng.choice([None, None, 3])
    b.call(nn.AvgPool2d(kernel, stride, padding, _flip(b), _flip(b), divisor), b.pick(b.images()))


def adaptive_pool(b: Builder) -> None:
    size = b.rng.choice([1, 2, (1, 2), (None, 1)])
    b.call(b.rng.choice([nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])(size), b.pick(b.images()))


def upsample(b: Builder) -> None:
    mode = b.rng.choice(["nearest", "bilinear", "bilinear"])
    align = _flip(b) if mode == "bilinear" else None
    b.call(nn.Upsample(scale_factor=2, mode=mode, align_corners=align), b.pick(b.images()))


def move(b: Builder) -> None:
    x = b.pick(b.images())
    channels = b.values[x].shape[1]
    moves: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("flip rows", lambda v: v.flip(2)),
        ("transpose", lambda v: v.transpose(2, 3)),
        ("permute", lambda v: v.permute(0, 2, 3, 1)),
        ("rows", lambda v: v[:, :, 1:]),
        ("every second", lambda v: v[..., ::2]),
        ("channels", lambda v: v[:, : max(channels // 2, 1)]),
        ("flatten", lambda v: v.flatten(2)),
        ("reshape", lambda v: v.reshape(v.shape[0], channels, -1)),
        ("shuffle", lambda v: v.reshape(v.shape[0], 2, -1, *v.shape[2:]).transpose(1, 2).flatten(1, 2)),
        ("chunk", lambda v: v.chunk(2, 1)[-1]),
        ("split", lambda v: torch.split(v, 1, 2)[0]),
        ("pad zeros", lambda v: F.pad(v, (1, 0, 0, 1))),
        ("pad one", lambda v: F.pad(v, (0, 1), value=1.0)),
        ("pad reflect", lambda v: F.pad(v, (1, 1, 1, 1), mode="reflect")),
        ("roll", lambda v: v.roll(1, 2)),
        ("expand", lambda v: v.mean((2, 3), keepdim=True).expand(-1, -1, 2, 2)),
        ("unsqueeze", lambda v: v.unsqueeze(1).squeeze(1)),
    ]
    name, function = b.rng.choice(moves)
    if name == "shuffle" and channels % 2:
        raise ValueError("odd channels")
    b.add(name, lambda n, v: function(v), x)


def reduce(b: Builder) -> None:
    functions: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("mean", lambda v: v.mean((2, 3), keepdim=True)),
        ("mean channels", lambda v: v.mean(1, keepdim=True)),
        ("sum", lambda v: v.sum(-1, keepdim=True)),
        ("amax", lambda v: v.amax(3, keepdim=True)),
    ]
    name, function = b.rng.choice(functions)
    b.add(name, lambda n, v: function(v), b.pick(b.images()))


def normalize(b: Builder) -> None:
    x = b.pick(list(range(len(b.values))))
    value = b.values[x]
    choices: list[nn.Module] = [nn.LayerNorm(value.shape[-1])]
    if value.ndim == 4:
        choices += [nn.GroupNorm(1, value.shape[1]), nn.BatchNorm2d(value.shape[1]).eval()]
    b.call(b.rng.choice(choices), x)


def product(b: Builder) -> None:
    x = b.pick([i for i, v in enumerate(b.values) if v.ndim >= 3 and v.shape[-1] < 64 and v.shape[-2] < 64])
    b.add("matmul transposed", lambda n, v: torch.matmul(v, v.transpose(-1, -2)), x)


def gate(b: Builder) -> None:
    x = b.pick(b.images())
    channels = b.values[x].shape[1]
    inner = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1), b.rng.choice([nn.Sigmoid, nn.Hardsigmoid])()
    )
    name = b.layer(inner)
    b.add("squeeze-excite", lambda n, v: v * getattr(n, name)(v), x)


def again(b: Builder) -> None:
    """Call a layer a second time, on another value that fits."""
    names = [n for n, m in b.layers.items() if isinstance(m, nn.Conv2d | nn.Linear)]
    if not names:
        raise ValueError("no layer yet")
    name = b.rng.choice(names)
    x = b.rng.choice(range(len(b.values)))
    b.add(f"{name} again", lambda n, v: getattr(n, name)(v), x)


KINDS: list[tuple[Callable[[Builder], None], int]] = [
    (conv, 6),
    (conv_norm, 5),
    (functional_conv, 2),
    (deconv, 1),
    (linear, 3),
    (flat_linear, 1),
    (activation, 5),
    (clamp, 1),
    (binary, 4),
    (constant, 2),
    (concat, 2),
    (max_pool, 2),
    (average_pool, 2),
    (adaptive_pool, 1),
    (upsample, 1),
    (move, 4),
    (reduce, 1),
    (normalize, 1),
    (product, 1),
    (gate, 1),
    (again, 1),
]


def random_net(seed: int, size: int = 8) -> tuple[RandomNet, Tensor]:
    """A net of about ``size`` steps, in eval mode, and an input of two samples."""
    torch.manual_seed(seed)
    b = Builder(random.Random(seed))
    b.values.append(torch.randn(2, b.rng.choice([1, 3, 4]), b.rng.choice([7, 8]), b.rng.choice([6, 8, 9])))
    kinds, weights = zip(*KINDS, strict=True)
    for _ in range(20 * size):
        if len(b.steps) >= size:
            break
        before = len(b.layers), len(b.steps), len(b.values)
        try:
            b.rng.choices(kinds, weights)[0](b)
        except (ValueError, RuntimeError, IndexError):  # drawn arguments that do not fit
            b.layers = dict(list(b.layers.items())[: before[0]])
            del b.steps[before[1] :], b.values[before[2] :]
    read = {r for _, _, reads in b.steps for r in reads}
    outputs = [i for i in range(1, len(b.values)) if i not in read]
    if _flip(b, 0.3):
        outputs = sorted({*outputs, b.rng.choice(range(1, len(b.values)))})
    return RandomNet(b.layers, b.steps, outputs).eval(), b.values[0]
