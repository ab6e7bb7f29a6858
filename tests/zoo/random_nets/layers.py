"""Steps with a weight: convolutions, transposed convolutions, linear layers and norms, as modules and as functions."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.random_nets.builder import Builder, divisors

CONVS = nn.Conv1d, nn.Conv2d, nn.Conv3d
DECONVS = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
PADDING_MODES = "zeros", "zeros", "zeros", "reflect", "replicate", "circular"


def conv(b: Builder) -> None:
    x = b.image()
    channels = b.values[x].shape[1]
    groups = b.rng.choice(divisors(channels, 1, 1, 2, channels))
    padding = b.one_of(b.each(0, 1), b.each(1, 2), "same", "valid")
    stride = 1 if padding == "same" else b.each(1, 2)
    settings = {"dilation": b.each(1, 1, 2), "groups": groups, "bias": b.flip()}
    kind, out, kernel = b.of_rank(*CONVS), groups * b.one_of(1, 2, 3), b.each(1, 2, 3)
    b.call(kind(channels, out, kernel, stride, padding, padding_mode=b.one_of(*PADDING_MODES), **settings), x)


def functional_conv(b: Builder) -> None:
    x = b.image()
    channels = b.values[x].shape[1]
    groups = b.rng.choice(divisors(channels, 1, 2, channels))
    kernel = [b.one_of(1, 2, 3) for _ in range(b.rank)]
    out = groups * b.one_of(1, 2)
    weight, bias = b.parameter(out, channels // groups, *kernel), b.parameter(out) if b.flip() else ""
    function = b.one_of(b.of_rank(F.conv1d, F.conv2d, F.conv3d), b.of_rank(torch.conv1d, torch.conv2d, torch.conv3d))
    settings = {"stride": b.each(1, 2), "padding": b.each(0, 1), "dilation": b.each(1, 2), "groups": groups}
    b.add(
        f"F.conv {kernel} {settings}",
        lambda n, v: function(v, getattr(n, weight).value, getattr(n, bias).value if bias else None, **settings),
        x,
    )


def deconv(b: Builder) -> None:
    x = b.image()
    channels = b.values[x].shape[1]
    groups = b.rng.choice(divisors(channels, 1, 1, 2))
    stride = b.one_of(1, 2, 3)
    settings = {
        "padding": b.each(0, 1),
        "output_padding": b.one_of(0, stride - 1),
        "groups": groups,
        "bias": b.flip(),
        "dilation": b.one_of(1, 1, 2),
    }
    b.call(b.of_rank(*DECONVS)(channels, groups * b.one_of(1, 2), b.each(2, 3), stride, **settings), x)


def functional_deconv(b: Builder) -> None:
    x = b.image()
    channels = b.values[x].shape[1]
    weight = b.parameter(channels, 2, *(2 for _ in range(b.rank)))
    function = b.of_rank(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    stride = b.one_of(1, 2)
    b.add(f"F.conv_transpose stride {stride}", lambda n, v: function(v, getattr(n, weight).value, stride=stride), x)


def norm(b: Builder, x: int) -> int:
    kind = b.of_rank(*NORMS)
    made = kind(b.values[x].shape[1], eps=b.one_of(1e-5, 1e-2), affine=b.flip(0.8))
    with torch.no_grad():
        if made.affine:
            made.weight.uniform_(-1.5, 1.5)
            made.bias.uniform_(-1, 1)
        made.running_mean.uniform_(-0.5, 0.5)
        made.running_var.uniform_(0.2, 2)
    return b.call(made, x)


def conv_norm(b: Builder) -> None:
    b.one_of(conv, conv, conv, deconv)(b)
    x = norm(b, len(b.values) - 1)
    if b.flip():
        b.call(nn.ReLU(), x)


def linear(b: Builder) -> None:
    x = b.any()
    features = b.values[x].shape[-1]
    if b.values[x].ndim < 2 or features > 512:
        raise ValueError("no features")
    if b.flip(0.7):
        b.call(nn.Linear(features, b.one_of(1, 3, 8), bias=b.flip(0.7)), x)
    else:
        weight, bias = b.parameter(5, features), b.parameter(5) if b.flip() else ""
        b.add(
            "F.linear",
            lambda n, v: F.linear(v, getattr(n, weight).value, getattr(n, bias).value if bias else None),
            x,
        )


def multiplied(b: Builder) -> None:
    """A linear layer that is written as a product."""
    x = b.any()
    features = b.values[x].shape[-1]
    if b.values[x].ndim < 2 or features > 512:
        raise ValueError("no features")
    weight = b.parameter(features, 5)
    b.add("@ parameter", lambda n, v: v @ getattr(n, weight).value, x)


def flat_linear(b: Builder) -> None:
    x = b.image()
    if b.values[x][0].numel() > 2048:
        raise ValueError("too many features")
    x = b.call(nn.Sequential(nn.Flatten(), nn.Linear(b.values[x][0].numel(), b.one_of(4, 7))), x)
    if b.flip(0.3):
        b.call(nn.BatchNorm1d(b.values[x].shape[1]), x)


def normalize(b: Builder) -> None:
    x = b.any()
    value = b.values[x]
    choices: list[nn.Module] = [nn.LayerNorm(value.shape[-1])]
    if value.ndim == b.rank + 2:
        channels = value.shape[1]
        groups = b.rng.choice(divisors(channels, 1, 2))
        instance = b.of_rank(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
        choices += [nn.GroupNorm(groups, channels), instance(channels, affine=b.flip())]
        if b.flip(0.3):
            norm(b, x)
            return
    b.call(b.rng.choice(choices), x)


def gate(b: Builder) -> None:
    x = b.image()
    channels = b.values[x].shape[1]
    pool = b.of_rank(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
    inner = nn.Sequential(pool(1), b.of_rank(*CONVS)(channels, channels, 1), b.one_of(nn.Sigmoid, nn.Hardsigmoid)())
    name = b.layer(inner)
    b.add("squeeze-excite", lambda n, v: v * getattr(n, name)(v), x)


def again(b: Builder) -> None:
    """Call a layer a second time, on a value that fits: another one, or the same."""
    names = [n for n, m in b.layers.items() if isinstance(m, (*CONVS, nn.Linear))]
    if not names:
        raise ValueError("no layer yet")
    name = b.rng.choice(names)
    x = b.rng.choice(range(len(b.values)))
    b.add(f"{name} again", lambda n, v: getattr(n, name)(v), x)


def shared_weight(b: Builder) -> None:
    """Two layers with one weight."""
    x = b.image()
    channels = b.values[x].shape[1]
    first, second = (b.of_rank(*CONVS)(channels, channels, 3, padding=1, bias=b.flip()) for _ in range(2))
    second.weight = first.weight
    b.call(second, b.call(first, x))
