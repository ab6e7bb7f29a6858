"""Steps that look at windows: pools, upsampling and padding."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.random_nets.builder import Builder


def max_pool(b: Builder) -> None:
    kernel, stride, padding = b.one_of((2, 2, 0), (3, 2, 1), (2, 2, 1), (3, 1, 1), (b.each(2, 3), b.each(1, 2), 1))
    dilation, ceil = b.one_of(1, 1, 2), b.flip()
    x = b.image()
    if b.flip(0.7):
        kind = b.of_rank(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
        b.call(kind(kernel, stride, padding, dilation, ceil_mode=ceil), x)
    else:
        function = b.of_rank(F.max_pool1d, F.max_pool2d, F.max_pool3d)
        given = (kernel, stride, padding, dilation, ceil)
        b.add(f"F.max_pool{given}", lambda n, v: function(v, *given), x)


def average_pool(b: Builder) -> None:
    kernel, stride, padding = b.one_of((2, 2, 0), (3, 2, 1), (2, 1, 1), (b.each(2, 3), 2, 1), (3, 3, 0))
    given = [kernel, stride, padding, b.flip(), b.flip()] + ([b.one_of(None, None, 3)] if b.rank > 1 else [])
    x = b.image()
    if b.flip(0.7):
        b.call(b.of_rank(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)(*given), x)
    else:
        function = b.of_rank(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
        b.add(f"F.avg_pool{given}", lambda n, v: function(v, *given), x)


def adaptive_pool(b: Builder) -> None:
    average = b.of_rank(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
    largest = b.of_rank(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
    size = b.one_of(1, 2, tuple(b.one_of(1, 2) for _ in range(b.rank)))
    b.call(b.one_of(average, average, largest)(size), b.image())


def upsample(b: Builder) -> None:
    smooth = ("linear",), ("bilinear", "bicubic"), ("trilinear",)
    mode = b.one_of("nearest", "nearest", *smooth[b.rank - 1])
    align = None if mode == "nearest" else b.flip()
    scale = b.one_of(2, 2, 1.5, 3)
    x = b.image()
    if b.flip(0.7):
        b.call(nn.Upsample(scale_factor=scale, mode=mode, align_corners=align), x)
    else:
        size = [s + 2 for s in b.values[x].shape[2:]]
        b.add(f"interpolate {size} {mode} {align}", lambda n, v: F.interpolate(v, size, None, mode, align), x)


def pad(b: Builder) -> None:
    """Padding of every mode, of some or all dimensions; negative padding cuts off."""
    x = b.image()
    mode = b.one_of("constant", "constant", "reflect", "replicate", "circular")
    dims = b.rank if mode != "constant" else b.one_of(1, b.rank)
    pads = [b.one_of(0, 1, 1, 2) for _ in range(2 * dims)]
    if mode == "constant" and b.flip(0.2):
        pads[0] = -1
    value = b.one_of(0.0, 1.0, -0.5) if mode == "constant" else None
    b.add(f"pad {pads} {mode} {value}", lambda n, v: F.pad(v, pads, mode, value), x)


def pad_module(b: Builder) -> None:
    kinds: tuple[tuple[Callable[..., nn.Module], ...], ...] = (
        (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
        (nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
        (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
        (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    )
    b.call(b.of_rank(*b.one_of(*kinds))(b.one_of(1, tuple(b.one_of(0, 1, 2) for _ in range(2 * b.rank)))), b.image())


def shuffle_pixels(b: Builder) -> None:
    if b.rank != 2:
        raise ValueError("for images only")
    x = b.image()
    functions: list[Callable[[Tensor], Tensor]] = [lambda v: F.pixel_shuffle(v, 2), lambda v: F.pixel_unshuffle(v, 2)]
    function = b.rng.choice(functions)
    b.add("pixel shuffle", lambda n, v: function(v), x)
