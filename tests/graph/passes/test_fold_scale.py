"""Folding sums and products with constants into the layer before them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bitwright as bw
from tests.graph.passes.folding import check, image, livened, with_gain
from tests.graph.passes.nets import FrozenNorm, Net

CONV = {"a": lambda: nn.Conv2d(3, 4, 3, padding=1), "bn": lambda: nn.BatchNorm2d(4), "drop": lambda: nn.Dropout(0.3)}


@pytest.mark.parametrize(
    ("body", "shape", "count"),
    [
        (lambda self, x: self.a(x) * 0.5 + 3, (4,), 2),
        (lambda self, x: 2.0 - self.a(x) / 4, (4,), 2),
        (lambda self, x: self.gain * self.a(x) + x.mean(), (4, 1, 1), 1),
        (lambda self, x: (self.a(x).permute(0, 2, 3, 1) * self.gain).permute(0, 3, 1, 2) + x.mean(), (4,), 1),
        (lambda self, x: self.drop(self.a(x)).mul(self.gain.reshape(1, -1, 1, 1).exp()), (4,), 1),
        (lambda self, x: torch.sub(self.bn(self.a(x)) / self.gain, self.gain), (1, 4, 1, 1), 2),
        (lambda self, x: self.a(x) + self.gain, (1,), 1),
    ],
)
def test_constants_after_a_layer(body, shape, count):
    layers = {name: make() for name, make in CONV.items()}
    notes, model = check(with_gain(body, shape, **layers), image(), image(3, size=8), name="fold_scale")
    assert len([n for n in notes if n.startswith("folded")]) == count
    bw.calibrate(model, [image(4)])
    model(image(4)).pow(2).sum().backward()
    used = any(p is model.gain for p in model.parameters()) and "gain" in body.__code__.co_names
    assert not used or float(model.gain.grad.abs().max()) > 0


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_layer_scale_after_a_linear_layer(rank):
    net = with_gain(lambda self, x: x + self.gain * self.a(x), (6,), a=nn.Linear(6, 6))
    x = torch.randn(*[2, 3, 4, 5][-rank + 1 :], 6)
    notes, model = check(net, x, name="fold_scale")
    assert notes == ["folded mul into a"]
    weight, bias = model.a.folded_weight()
    assert torch.allclose(weight, net.a.weight * net.gain[:, None])
    assert torch.allclose(bias, net.a.bias * net.gain)


def test_a_written_out_norm_is_folded():
    def body(self, x):
        return torch.relu(self.n(self.a(x)) + self.m(self.c(x)))

    layers = {"a": nn.Conv2d(3, 4, 1, bias=False), "n": FrozenNorm(4), "c": nn.Conv2d(3, 4, 1), "m": FrozenNorm(4)}
    notes, model = check(Net(body, **layers), image(), image(5), name="fold_scale")
    assert sorted(n.split()[0] + n[-7:] for n in notes) == ["folded into a"] * 2 + ["folded into c"] * 2
    floats = {e.operator for e in bw.ledger_of(model).entries if e.verdict.value == "float"}
    assert "mul" not in floats


@pytest.mark.parametrize(
    ("body", "shape", "note"),
    [
        (lambda self, x: 1.0 / self.a(x), (4,), "it divides by the layer's result"),
        (lambda self, x: (lambda y: y * 2.0 + y)(self.a(x)), (4,), "a has 2 users"),
        (lambda self, x: self.a(x) * 2.0 + self.a(-x), (4,), "a is called more than once"),
        (
            lambda self, x: self.a(x) + self.gain,
            (6, 6),
            "its constant varies along axes other than the layer's channels",
        ),
        (
            lambda self, x: self.a(x) * self.gain,
            (5, 1, 1, 1, 1),
            "the constant changes the shape or type of the result",
        ),
        (
            lambda self, x: self.a(x) * torch.ones(4, 1, 1).double(),
            (4, 1, 1),
            "the constant changes the shape or type of the result",
        ),
    ],
)
def test_constants_that_stay(body, shape, note):
    net = with_gain(body, shape, a=nn.Conv2d(3, 4, 1))
    notes, _ = check(net, image(), name="fold_scale", folds=False, steady="divides" not in note)
    assert [n.split(", ", 1)[1] for n in notes] == [note] * len(notes)
    assert notes


def test_a_constant_that_the_model_writes_stays():
    def body(self, x):
        y = self.a(x) * self.steps
        self.steps.add_(1.0)
        return y

    net = Net(body, a=nn.Linear(5, 3))
    net.register_buffer("steps", torch.ones(()))
    model = bw.prepare(net, torch.randn(2, 5))
    assert "fold_scale: not folded: mul into a, the model writes into steps" in bw.ledger_of(model).notes


def test_a_sum_before_a_softmax_is_folded_all_the_same():
    net = with_gain(lambda self, x: torch.softmax(self.a(x) + self.gain, -1), (4,), a=nn.Linear(6, 4))
    notes, _ = check(net, torch.randn(3, 6), name="fold_scale")
    assert notes == ["folded add into a"]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "sub", "mul", "div"]), st.booleans(), st.booleans()), max_size=4),
    st.booleans(),
)
def test_any_chain_of_constants_is_one_affine_map(steps, with_norm):
    torch.manual_seed(len(steps))

    def body(self, x):
        y = self.a(x)
        y = self.bn(y) if with_norm else y
        for i, (name, per_channel, first) in enumerate(steps):
            c = getattr(self, f"c{i}") if per_channel else 1.5
            y = getattr(torch, name)(c, y) if per_channel and first and name != "div" else getattr(torch, name)(y, c)
        return y

    net = Net(body, a=nn.Linear(5, 3), bn=nn.BatchNorm1d(3))
    for i in range(len(steps)):
        setattr(net, f"c{i}", nn.Parameter(torch.rand(3) + 0.5))
    livened(net)
    model = bw.prepare(net, torch.randn(4, 5))
    x = torch.randn(6, 5)
    assert torch.equal(model(x), net(x))
    weight, bias = model.a.folded_weight()
    assert torch.allclose(F.linear(x, weight, bias), net(x), atol=1e-4, rtol=1e-4)
