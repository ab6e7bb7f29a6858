"""What the tests of capture share: small nets, and a check that a captured net computes what the original does."""

import copy
import dataclasses

import torch
from torch import nn

import bitwright as bw
from bitwright.graph import CapturedModel


class Net(nn.Module):
    """A convolution, and a forward given as a function of (self, x, …)."""

    def __init__(self, body, **parts):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.body = body
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


def image(batch=2, size=8):
    return torch.randn(batch, 3, size, size)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and same(vars(a), vars(b))
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def prepared(model, example, *others):
    """Prepare, check that original and copy agree on all inputs, and that nothing is an island."""
    model = model.eval()
    quantized = bw.prepare(
        model, example, recipe={"schedules": {"split_attention": False}}
    )  # its parts round differently
    assert bw.ledger_of(quantized).islands == {}
    assert isinstance(quantized, CapturedModel)
    for inputs in (example, *others):
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        keywords = {}
        if isinstance(inputs, dict):
            given, keywords = (), inputs
        with torch.no_grad():
            expected = model(*copy.deepcopy(given), **copy.deepcopy(keywords))
            assert same(quantized(*copy.deepcopy(given), **copy.deepcopy(keywords)), expected)
    return quantized


class DataDependent(nn.Module):
    """Decides by its data."""

    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.single = nn.Conv2d(width, width, 1)

    def forward(self, x):
        if x.mean() > 100:
            return x
        return self.single(self.inner(x))


class Doubled(torch.autograd.Function):
    """Twice its input, and a gradient of three."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3
