"""Capture: constructs of Python and torch that models are written with, each in a small net."""

import collections
import contextlib
import functools
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from bitwright.errors import CaptureError
from bitwright.graph import capture_model
from bitwright.nn import QuantConv2d
from tests.graph.capture.capturing import Doubled, Net, image, prepared


@torch.jit.script
def scripted(x, slope: float):
    if x.dim() == 3:
        x = x + 1
    return torch.where(x > 0, x, x * slope)


@torch.jit.ignore
def ignored(x, places):
    return x.roll(places, -1) * len(x.shape)


def rearrange(x, pattern, **sizes):
    """A small einops: ``"b (h p) w -> b h (p w)"``."""
    left, right = pattern.split("->")

    def groups(text):
        found, inside = [], None
        for token in text.replace("(", " ( ").replace(")", " ) ").split():
            if token == "(":
                inside = []
            elif token == ")":
                found, inside = [*found, inside], None
            elif inside is not None:
                inside.append(token)
            else:
                found.append([token])
        return found

    sources, targets = groups(left), groups(right)
    known = dict(sizes)
    for size, names in zip(x.shape, sources, strict=True):
        unknown = [n for n in names if n not in known]
        if unknown:
            known[unknown[0]] = size // math.prod(known[n] for n in names if n in known)
    flat = [n for names in sources for n in names]
    x = x.reshape([known[n] for n in flat])
    x = x.permute([flat.index(n) for names in targets for n in names])
    return x.reshape([math.prod(known[n] for n in names) for names in targets])


class Boxes(NamedTuple):
    xy: torch.Tensor
    wh: torch.Tensor | None = None


def new_zeros(self, x):
    x = self.conv(x)
    return torch.cat([x, x.new_zeros(x.size(0), 1, *x.shape[2:]), x.new_ones((x.shape[0], 1, x.size(2), x.size(3)))], 1)


def scaled_by_size(self, x):
    q = self.conv(x).flatten(2)
    return (q @ q.transpose(1, 2) / math.sqrt(q.size(-1))).softmax(-1)


def einsum(self, x):
    x = self.conv(x)
    return torch.einsum("bchw,bdhw->bcd", x, x) + torch.einsum("bchw->bc", x).unsqueeze(-1)


def masked(self, x):
    x = self.conv(x)
    x = x.masked_fill(x > 0.5, 0.5)
    return torch.where(x < -0.5, -0.5, x) + torch.where(x > 0, x, torch.zeros_like(x)) * (x >= 0)


def boolean_index(self, x):
    x = self.conv(x)
    x[x > 0.25] = 0.25
    return x


def made_by_pow(self, x):
    x = self.conv(x)
    return 0.5 * x * (1 + torch.tanh(0.79 * (x + 0.044 * torch.pow(x, 3.0)))) + torch.pow(2.0, x) + x**2 + 2**x


def compared(self, x):
    x = self.conv(x)
    return torch.maximum(x, torch.zeros((), device=x.device)).clamp(max=3.0) + torch.clamp(x, -1, 1)


def by_partial(self, x):
    pad = functools.partial(F.pad, pad=(1, 1), mode="constant", value=0.5)
    return functools.reduce(lambda a, f: f(a), [self.conv, pad, lambda t: t * 2], x)


def by_lambda_and_closure(self, x):
    scale = x.shape[-1]
    shift = lambda t, by=1: t + by * scale  # noqa: E731
    return shift(self.conv(x), by=2)


def by_comprehension(self, x):
    maps = {f"level{i}": F.avg_pool2d(self.conv(x), 2**i) for i in range(3)}
    return torch.cat([m.flatten(1) for name, m in maps.items() if name != "level1"], 1)


def by_try(self, x):
    try:
        return self.missing(x)
    except AttributeError:
        pass
    with contextlib.suppress(KeyError):
        return {}["nothing"]
    try:
        return self.conv(x)
    finally:
        del x


def by_generator(self, x):
    def windows(t):
        for i in range(0, 4, 2):
            yield t[:, i : i + 2]

    return torch.stack(list(windows(self.conv(x))), 1) + next(iter(windows(x)))[:, :1].unsqueeze(1)


def by_rearranging(self, x):
    x = self.conv(x)
    y = rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2)
    return rearrange(y, "b n (p c) -> (b n) p c", c=4).mean(1)


def by_function(self, x):
    return Doubled.apply(self.conv(x)) + 1


def by_script(self, x):
    return scripted(self.conv(x), 0.1) + ignored(x, 1).mean(1, keepdim=True)


def by_checkpoint(self, x):
    x = torch.utils.checkpoint.checkpoint(self.conv, x, use_reentrant=False)
    return torch.utils.checkpoint.checkpoint(lambda t, k: t * k, x, 3, use_reentrant=True)


def by_checkpoint_sequential(self, x):
    return torch.utils.checkpoint.checkpoint_sequential([self.conv, nn.ReLU()], 2, x, use_reentrant=False)


def by_collections(self, x):
    kept = collections.defaultdict(list)
    queue = collections.deque([x])
    while queue:
        item = queue.popleft()
        kept["seen"].append(self.conv(item[:, :3]))
        if len(kept["seen"]) < 3:
            queue.append(kept["seen"][-1])
    return sum(kept["seen"])


def by_named_tuple(self, x):
    boxes = Boxes(self.conv(x)[:, :2])
    boxes = boxes._replace(wh=boxes.xy.exp())
    xy, wh = boxes
    return xy if boxes.wh is None else xy - wh / 2


def by_meshgrid(self, x):
    x = self.conv(x)
    h, w = x.shape[-2:]
    rows, columns = torch.meshgrid(torch.arange(h, device=x.device), torch.arange(w, device=x.device), indexing="ij")
    grid = torch.stack((columns, rows), -1).to(x.dtype) / torch.tensor([w, h], dtype=x.dtype)
    return F.grid_sample(x, (2 * grid - 1).expand(x.shape[0], -1, -1, -1), align_corners=False)


def by_triangle(self, x):
    n = x.shape[-1]
    mask = torch.full((n, n), float("-inf")).triu(1) + torch.tril(torch.ones(n, n))
    rows, columns = torch.tril_indices(n, n)
    return self.conv(x).softmax(-1) @ mask.exp() + len(rows.shape) + columns.max() * 0


def by_ceiling(self, x):
    size = (math.ceil(x.shape[2] / 3), math.floor(x.shape[3] / 2))
    return F.adaptive_max_pool2d(self.conv(x), size) * round(x.shape[2] / 3)


def by_walrus_and_star(self, x):
    first, *rest = self.conv(x).split(1, 1)
    return first + (total := sum(rest)) + [*rest][-1] * total.ndim


def by_type_method(self, x):
    y = self.conv(x)
    return torch.add(y.to(torch.float64), 1).type_as(y) + y.expand_as(y).contiguous().view(y.size())


def by_set_of_sizes(self, x):
    y = self.conv(x)
    return y if len({t.shape[-1] for t in (x, y)}) == 1 else y * 2


def by_asking_what_is_callable(self, x):
    y, even = self.conv(x), x.shape[2] % 2 == 0
    return y * 2 if not callable(y) and not callable(even) and callable(y.sum) else y


def by_len_of_tensors(self, x):
    y = self.conv(x)
    return torch.cat([y, y.new_zeros(len(y), len(y[0]), 1, len(y[0, 0, 0]))], 2) * (2 if len(x.shape) == 4 else 1)


def by_checks(self, x):
    y = self.conv(x)
    torch._check(x.shape[2] % 2 == 0, lambda: "an odd height")
    torch._check_tensor_all(y == y, lambda: f"NaN in {y.sum()}")
    return y


def by_writing_into_a_constant(self, x):
    canvas = torch.zeros(2, 4, 8, 8)
    y = self.conv(x)
    canvas[:, 1:3] = y[:, 1:3]
    canvas[:, 0].copy_(y[:, 3])
    return canvas * 2


FREE = [
    *(new_zeros, einsum, masked, boolean_index, made_by_pow, compared, by_partial, by_lambda_and_closure),
    *(by_comprehension, by_try, by_generator, by_rearranging, by_function, by_script, by_checkpoint),
    *(by_checkpoint_sequential, by_collections, by_named_tuple, by_meshgrid, by_triangle, by_ceiling),
    *(by_walrus_and_star, by_type_method, by_set_of_sizes, by_asking_what_is_callable, by_checks),
    by_len_of_tensors,
]


@pytest.mark.parametrize("body", FREE, ids=lambda f: f.__name__)
def test_a_construct_at_any_size(body):
    """Captured once, it computes what the original does for other batches and for other heights and widths."""
    quantized = prepared(Net(body), image(2, 8), image(3, 8), image(1, 16))
    assert any(isinstance(m, QuantConv2d) for m in quantized.modules())


@pytest.mark.parametrize("body", [scaled_by_size, by_writing_into_a_constant], ids=lambda f: f.__name__)
def test_a_construct_at_the_size_of_the_example(body):
    prepared(Net(body), image(2, 8), image(2, 8))


@pytest.mark.parametrize("size", [7, 8])
def test_checks_that_a_model_makes_are_made_by_its_graph(size):
    captured = capture_model(Net(by_checks).eval(), image(2)).model
    with pytest.raises(CaptureError, match=r"if at .* gives False" if size == 7 else "its check of data at"):
        captured(image(2, size) * (1 if size == 7 else torch.nan))


def test_what_is_written_into_a_constant_follows_the_data():
    model = Net(by_writing_into_a_constant).eval()
    captured = capture_model(model, image(2)).model
    x = image(2) * 3
    assert torch.equal(captured(x), model(x))
    assert not torch.equal(captured(x), captured(image(2)))
