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

import bitwright as bw
from bitwright.graph import CapturedModel, capture_model
from bitwright.nn import QuantConv2d, QuantLinear
from tests.graph.capture.capturing import Net, image, prepared, same


class Doubled(torch.autograd.Function):
    """Twice its input, and a gradient of three."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


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
    *(by_walrus_and_star, by_type_method, by_set_of_sizes),
]


@pytest.mark.parametrize("body", FREE, ids=lambda f: f.__name__)
def test_a_construct_at_any_size(body):
    """Captured once, it computes what the original does for other batches and for other heights and widths."""
    quantized = prepared(Net(body), image(2, 8), image(3, 8), image(1, 16))
    assert any(isinstance(m, QuantConv2d) for m in quantized.modules())


@pytest.mark.parametrize("body", [scaled_by_size, by_writing_into_a_constant], ids=lambda f: f.__name__)
def test_a_construct_at_the_size_of_the_example(body):
    prepared(Net(body), image(2, 8), image(2, 8))


def test_what_is_written_into_a_constant_follows_the_data():
    model = Net(by_writing_into_a_constant).eval()
    captured = capture_model(model, image(2)).model
    x = image(2) * 3
    assert torch.equal(captured(x), model(x))
    assert not torch.equal(captured(x), captured(image(2)))


def test_the_gradient_of_a_custom_function_is_kept():
    model = Net(by_function).eval()
    captured = capture_model(model, image()).model
    x = image().requires_grad_()
    captured(x).sum().backward()
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    assert torch.equal(x.grad, expected)
    plain = torch.autograd.grad(model.conv(x).sum(), x)[0]
    assert torch.allclose(x.grad, 3 * plain, atol=1e-5)


def test_no_gradient_passes_a_no_grad_block():
    def body(self, x):
        with torch.no_grad():
            frozen, gate = self.conv(x).chunk(2, 1)
            frozen = frozen * 2
        return self.head(frozen + gate.sigmoid())

    model = Net(body, head=nn.Conv2d(2, 2, 1)).eval()
    quantized = prepared(model, image())
    quantized(image()).sum().backward()
    assert quantized.conv.weight.grad is None
    assert quantized.head.weight.grad is not None


def test_a_decorated_forward_and_enabled_gradients():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        @torch.no_grad()
        def forward(self, x):
            with torch.enable_grad():
                live = self.fc(x)
            return self.fc(x).detach() + 1, live

    quantized = prepared(Frozen(), torch.randn(2, 3))
    frozen, live = quantized(torch.randn(2, 3))
    assert not frozen.requires_grad
    assert live.requires_grad


def test_an_autocast_block_is_an_island():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.fc(x)
            with torch.autocast("cpu", enabled=False):
                return y.float() + 1

    model = nn.Sequential(nn.Linear(3, 3), Mixed()).eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    (reason,) = bw.ledger_of(quantized).islands.values()
    assert reason.startswith(f"Untraceable: an autocast block cannot be recorded at {__file__}:")
    x = torch.randn(5, 3)
    assert torch.equal(quantized(x), model(x))


def test_what_the_users_code_catches_is_not_forgotten():
    def body(self, x):
        try:
            scale = float(x.mean())
        except Exception:
            scale = 1.0
        return self.conv(x) * scale

    model = Net(body).eval()
    quantized = bw.prepare(model, image())
    assert list(bw.ledger_of(quantized).islands) == [""]
    x = image(3)
    assert torch.equal(quantized(x), model(x))


class Buffered(nn.Module):
    """Buffers that forward gives other values: set anew, added to, written into, grown."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("ring", torch.zeros(4, 3), persistent=False)
        self.register_buffer("grown", torch.zeros(0, 3), persistent=False)
        self.plain = torch.zeros(3)

    def forward(self, x):
        x = self.fc(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.calls += 1
        self.ring[1] = x[0]
        self.plain.add_(x[0])
        self.grown = torch.cat([self.grown, x[:1]])
        return x - self.mean + self.ring.sum(0) * self.calls + self.grown.sum(0) + self.plain


def test_buffers_that_forward_updates():
    model = nn.Sequential(nn.Linear(3, 3), Buffered()).eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    assert bw.ledger_of(quantized).islands == {}
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 3)
            assert torch.equal(quantized(x), model(x))
    for name in ("mean", "calls", "ring", "grown"):
        assert torch.equal(getattr(quantized.get_submodule("1"), name), getattr(model[1], name))
    assert int(model[1].calls) == 4


class Remembering(nn.Module):
    """Keeps what it saw in plain Python: a cache in a list, a number of calls, the last result."""

    def __init__(self, reads):
        super().__init__()
        self.fc, self.reads = nn.Linear(3, 3), reads
        self.calls, self.seen, self.last = 0, [], None

    def forward(self, x):
        x = self.fc(x)
        self.calls += 1
        self.seen.append(x)
        self.last = x
        return x + sum(self.seen) * self.calls if self.reads else x


@pytest.mark.parametrize("reads", [False, True])
def test_state_in_plain_python(reads):
    """Where the result depends on it the module runs as written; where nobody reads it the graph does without."""
    model = nn.Sequential(nn.Linear(3, 3), Remembering(reads), nn.ReLU()).eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    assert bw.ledger_of(quantized).islands == ({"1": "it keeps state from call to call"} if reads else {})
    assert (model[1].calls, model[1].seen, quantized.get_submodule("1").seen) == (0, [], [])
    assert isinstance(quantized.get_submodule("1.fc"), QuantLinear)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 3)
            assert torch.equal(quantized(x), model(x))


def test_containers_of_modules_and_parameters():
    class Contained(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
            self.heads = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
            self.shifts = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(3)])
            self.gains = nn.ParameterDict({"a": nn.Parameter(torch.randn(2)), "b": nn.Parameter(torch.randn(2))})

        def forward(self, x):
            for step, shift in zip(self.steps[1:], self.shifts, strict=False):
                x = step(x) + shift
            x = x * self.shifts[-1] + len(self.steps)
            return {name: head(x) * self.gains[name] for name, head in self.heads.items()}

    model = Contained()
    quantized = prepared(model, torch.randn(2, 3), torch.randn(5, 3))
    sum(v.sum() for v in quantized(torch.randn(2, 3)).values()).backward()
    unused = {n for n, p in quantized.named_parameters() if p.grad is None}
    assert unused == {"steps.0.weight", "steps.0.bias"}


def test_a_parameter_read_behind_the_back_of_the_trace_is_not_frozen():
    class Penalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x), x.sum() * 0 + sum(p.pow(2).sum() for p in self.parameters())

    model = Penalized().eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    with torch.no_grad():
        quantized.fc.weight.mul_(2)
        model.fc.weight.mul_(2)
    x = torch.randn(2, 3)
    assert same(quantized(x), model(x))
    quantized(x)[1].backward()
    assert quantized.fc.weight.grad is not None


def test_hooks_of_every_kind_are_kept():
    calls = collections.Counter()
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), nn.ReLU()).eval()

    def count(name, result=None):
        return lambda module, *rest: calls.update([name]) or (result(*rest) if result else None)

    model[0].register_forward_pre_hook(count("pre", lambda args: (args[0] * 2,)))
    model[0].register_forward_hook(count("forward", lambda args, out: out + 1))
    model[0].register_full_backward_hook(count("backward", lambda given, out: (given[0] * 5,)))
    model[1].register_forward_hook(count("inner", lambda args, out: out - 1))
    quantized = prepared(model, torch.randn(2, 3), torch.randn(4, 3))
    x, y = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    calls.clear()
    quantized(x).sum().backward()
    assert calls["pre"] == calls["forward"] == calls["backward"] == 1
    model(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_a_compiled_module_is_a_leaf():
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU())))
    captured = capture_model(model, torch.randn(2, 3))
    assert isinstance(captured.model, CapturedModel)
    x = torch.randn(4, 3)
    assert torch.equal(captured.model(x), model(x))


@pytest.mark.parametrize("masked", [False, True])
def test_a_whole_transformer(masked):
    class Translating(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
            self.head = nn.Linear(8, 5)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]) if masked else None
            return self.head(self.body(source, target, tgt_mask=mask, tgt_is_causal=masked))

    def inputs(batch, length):
        return torch.randn(batch, 4, 8), torch.randn(batch, length, 8)

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        prepared(Translating(), inputs(2, 3), inputs(3, 3), inputs(1, 6))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_recurrent_layers_with_states():
    class Tagging(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
            self.gru = nn.GRU(8, 4)
            self.cell = nn.GRUCell(4, 4)

        def forward(self, x, state=None):
            out, (h, c) = self.lstm(x, state)
            out, last = self.gru(out.transpose(0, 1))
            return self.cell(out[-1], last.squeeze(0)), h, {"c": c}

    prepared(Tagging(), torch.randn(2, 5, 3), torch.randn(3, 7, 3))
    state = torch.zeros(4, 2, 4), torch.ones(4, 2, 4)
    prepared(Tagging(), (torch.randn(2, 5, 3), state), (torch.randn(2, 6, 3), state))
