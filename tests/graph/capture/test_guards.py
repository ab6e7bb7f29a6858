"""Capture: sizes stay free; where Python decided by a number, inputs that give another one are refused."""

import functools
import logging
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import CaptureError, CaptureWarning
from bitwright.graph import capture_model, is_guard
from tests.graph.capture.capturing import Net, image, prepared


def line_of(body, offset):
    return re.escape(f"{__file__}:{body.__code__.co_firstlineno + offset}")


def by_branch(self, x):
    if x.shape[2] > 10:
        return self.conv(x)
    return self.conv(x) * 2


def by_loop(self, x):
    out = self.conv(x)
    for i in range(x.shape[3]):
        out = out + i
    return out


def by_items(self, x):
    return torch.cat([self.conv(item[None]) for item in x])


def by_length(self, x):
    return self.conv(x) * len(x.unbind())


def by_integer(self, x):
    return F.interpolate(self.conv(x), size=int(x.shape[2] * 1.5))


def by_root(self, x):
    return self.conv(x) / math.sqrt(x.size(-1))


def by_chunks(self, x):
    return sum(part.mean(3) for part in self.conv(x).split(4, 3))


def by_table(self, x):
    return self.conv(x) * {8: 2.0, 12: 3.0}[x.shape[2]]


def by_truth(self, x):
    return self.conv(x) if x.shape[2] % 8 else self.conv(x) * 2


def by_smaller(self, x):
    return self.conv(x)[:, :, : min(x.shape[2], 10)]


CASES = [
    (by_branch, 1, "if", (2, 12)),
    (by_loop, 2, "an index", (2, 12)),
    (by_items, 1, "for", (3, 8)),
    (by_length, 1, "len()", (3, 8)),
    (by_integer, 1, "int()", (2, 12)),
    (by_root, 1, "float()", (2, 12)),
    (by_chunks, 1, "for", (2, 12)),
    (by_table, 1, "if", (2, 12)),
    (by_truth, 1, "if", (2, 12)),
    (by_smaller, 1, "if", (2, 12)),
]


@pytest.mark.parametrize(("body", "offset", "reader", "other"), CASES, ids=lambda c: getattr(c, "__name__", None))
def test_inputs_that_take_another_way_are_refused(body, offset, reader, other):
    model = Net(body).eval()
    quantized = prepared(model, image(2, 8), image(2, 8))
    message = rf"take another path .* {re.escape(reader)} at {line_of(body, offset)} gives .*, and gave .* when"
    with pytest.raises(CaptureError, match=message):
        quantized(image(*other))
    (decision,) = {(d.reader, d.where) for d in bw.ledger_of(quantized).guards}
    assert re.match(line_of(body, offset), decision[1])
    again = bw.prepare(model, image(*other))
    x = image(*other)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("body", "fits"),
    [(by_branch, [(1, 9), (5, 10)]), (by_truth, [(3, 16)]), (by_smaller, [(1, 9), (2, 4)]), (by_root, [(4, 8)])],
    ids=lambda c: getattr(c, "__name__", None),
)
def test_inputs_that_take_the_same_way_are_computed(body, fits):
    prepared(Net(body), image(2, 8), *(image(*size) for size in fits))


def test_a_text_made_of_sizes_only_warns(caplog):
    def body(self, x):
        name = f"map of {x.shape[2]} by {x.shape[3]}"
        return self.conv(x) * (1 if name else 0)

    model = Net(body).eval()
    captured = capture_model(model, image(2, 8)).model
    x = image(1, 12)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(captured(x), model(x))
    assert "format() at" in caplog.text
    assert "gives 12, and gave 8" in caplog.text


def test_unpacking_decides_nothing():
    def body(self, x):
        a, b = self.conv(x).chunk(2, 1)
        n, c, h, w = x.shape
        return (a * b).view(n, -1, h * w) + len(x.shape) + c

    told = capture_model(Net(body), image())
    assert told.guards == []
    assert not any(is_guard(n) for n in told.regions[""].graph.nodes)


def test_guards_survive_dead_code_elimination_and_copies():
    model = Net(by_branch).eval()
    region = capture_model(model, image(2, 8)).regions[""]
    region.graph.eliminate_dead_code()
    region.recompile()
    with pytest.raises(CaptureError, match="take another path"):
        region(image(2, 12))
    assert sum(is_guard(n) for n in region.graph.nodes) == 1


def test_nested_numbers_and_texts_of_the_inputs_are_checked():
    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, batch):
            x = self.fc(batch["x"])
            x = x.relu() if batch["mode"] == "relu" else x
            if batch.get("flag"):
                x = x + 1
            x = x if batch.get("mask") is None else x * batch["mask"]
            return getattr(x, batch["mode"])() * batch["n"]

    model = Told().eval()
    example = {"x": torch.randn(2, 3), "mode": "relu", "flag": True, "n": 2, "mask": None}
    quantized = prepared(model, (example,), ({**example, "x": torch.randn(4, 3), "n": 5},))
    for change in ({"mode": "tanh"}, {"flag": False}):
        with pytest.raises(CaptureError, match="take another path through the model"):
            quantized({**example, **change})


@functools.lru_cache
def ramp(length):
    return torch.arange(length) / 2


def kept_in_a_closure(function):
    keeper = functools.lru_cache(function)
    return lambda *args: keeper(*args)


class Ramps:
    """Where functions that keep results are found: globals, closures, methods."""

    closed = staticmethod(kept_in_a_closure(lambda *lengths: ramp.__wrapped__(lengths[-1])))

    @functools.lru_cache  # noqa: B019
    def method(self, shape):
        return ramp.__wrapped__(shape[3])


@pytest.mark.parametrize(
    "kept",
    [lambda x: ramp(x.shape[3]), lambda x: Ramps.closed(*x.shape), lambda x, own=Ramps(): own.method(x.shape)],  # noqa: B008
    ids=["global", "closure", "method"],
)
def test_functions_that_keep_results_are_traced_and_keep_no_proxies(kept):
    model = Net(lambda self, x: self.conv(x) + kept(x)).eval()
    quantized = bw.prepare(model, image(2, 8))
    assert not bw.ledger_of(quantized).islands
    for size in (8, 12):
        x = image(3, size)
        assert torch.equal(quantized(x), model(x))
        assert type(kept(x)) is torch.Tensor


def test_other_hashes_of_sizes_are_refused():
    """What keeps results by itself would keep a proxy."""
    found = {}

    def body(self, x):
        found.setdefault(x.shape[3], 2.0)
        return self.conv(x) * found[x.shape[3]]

    with pytest.warns(CaptureWarning, match="unhashable"):
        bw.prepare(Net(body).eval(), image(2, 8))
    assert all(type(key) is int for key in found)


def test_truths_are_compared_in_python_so_that_exporters_may_vary_the_batch():
    """Torch cannot compare a symbolic truth with another one."""

    def body(self, x):
        many, wide = x.shape[0] > 1, x.shape[3] > 100
        y = self.conv(x)
        if many != wide and (many == True) ^ wide:  # noqa: E712
            y = y * 2
        return y * (many & True) + int(many)

    model = Net(body).eval()
    captured = capture_model(model, image(3)).model
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(captured, (image(3),), dynamic_shapes=(({0: batch},),))
    x = image(5)
    assert torch.equal(program.module()(x), model(x))
    with pytest.raises(CaptureError, match="if at"):
        captured(image(1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.reshape(x, [x.shape[0], -1]),
        lambda x: torch.tile(x, (x.shape[0], 1, 1)),
        lambda x: torch.broadcast_to(x[:1], (x.shape[0], 3, 4)),
        lambda x: torch.unflatten(torch.cat([x, x]), 0, (x.shape[0], 2)),
        lambda x: torch.roll(x, x.shape[0] // 2, 0),
        lambda x: torch.narrow(x, 0, 0, x.shape[0] - 1),
        lambda x: torch.select(x, 0, x.shape[0] - 1),
        lambda x: torch.topk(x, x.shape[0] - 1, 0)[0],
        lambda x: torch.tril(x, x.shape[0] - 2),
    ],
)
def test_sizes_given_to_functions_stay_free(function):
    class Net(nn.Module):
        def forward(self, x):
            return function(x)

    captured = capture_model(Net(), torch.randn(4, 3, 4))
    assert not captured.guards
    for batch in (2, 4, 5):
        x = torch.randn(batch, 3, 4)
        assert torch.equal(captured.model(x), function(x))
