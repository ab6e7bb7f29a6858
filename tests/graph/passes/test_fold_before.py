"""Folding norms, sums and products into the layer after them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from tests.graph.passes.folding import WIDE, check, image, livened, with_gain
from tests.graph.passes.nets import Net


@pytest.mark.parametrize(
    ("body", "layer", "x", "count"),
    [
        (lambda self, x: self.a(self.bn1(x)), lambda: nn.Linear(6, 4), (5, 6), 1),
        (lambda self, x: self.a(self.bn2(x)), lambda: nn.Conv2d(6, 4, 3, groups=2), (2, 6, 7, 7), 1),
        (lambda self, x: self.a(self.bn2(x)), lambda: nn.Conv2d(6, 4, 1, bias=False), (2, 6, 4, 4), 1),
        (
            lambda self, x: self.a(self.bn2(x)),
            lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
            (2, 6, 7, 7),
            1,
        ),
        (lambda self, x: self.a((x - 0.5) / 0.25), lambda: nn.Conv2d(6, 4, 3, stride=2), (2, 6, 7, 7), 2),
        (
            lambda self, x: self.a(x * self.gain.reshape(-1, 1, 1)),
            lambda: nn.Conv2d(6, 4, 3, padding=1),
            (2, 6, 5, 5),
            1,
        ),
        (
            lambda self, x: self.a(x * self.gain.reshape(-1, 1, 1)),
            lambda: nn.ConvTranspose2d(6, 4, 3, groups=2),
            (2, 6, 5, 5),
            1,
        ),
        (lambda self, x: self.bn3(self.a(self.bn1(x) * self.gain + self.gain)), lambda: nn.Linear(6, 4), (5, 6), 3),
    ],
)
def test_what_stands_before_a_layer(body, layer, x, count):
    norms = {"bn1": nn.BatchNorm1d(6), "bn2": nn.BatchNorm2d(6), "bn3": nn.BatchNorm1d(4)}
    net = with_gain(body, (6,), a=layer(), **norms)
    notes, model = check(net, torch.randn(x), torch.randn(3, *x[1:]), name="fold_before")
    assert len(notes) == count
    assert all(n.endswith("into a after it") for n in notes)
    assert model.a.input_quantizer.quantizer is model.bitwright.quantizers.args_0
    assert torch.equal(copy.deepcopy(model)(torch.ones(x)), net(torch.ones(x)))


@pytest.mark.parametrize(
    ("body", "layer", "note"),
    [
        (lambda self, x: self.a(self.bn(x)), lambda: nn.Conv2d(6, 4, 3, padding=1), "pads with zeros"),
        (lambda self, x: self.a(x + 1.0), lambda: nn.ConvTranspose2d(6, 4, 3), "does not apply its shift"),
        (
            lambda self, x: self.a((lambda y: y)(self.bn(x))) + self.bn(x).sum(),
            lambda: nn.Conv2d(6, 4, 1),
            "more than once",
        ),
        (lambda self, x: (lambda y: self.a(y) + y.sum())(self.bn(x)), lambda: nn.Conv2d(6, 4, 1), "it has 2 users"),
        (lambda self, x: self.a(self.bn(x)), lambda: nn.Linear(5, 4), "an axis other"),
        (lambda self, x: self.a(1.0 / (x * x + 1.0)), lambda: nn.Conv2d(6, 4, 1), "divides by the layer's input"),
    ],
)
def test_what_stays_before_a_layer(body, layer, note):
    net = Net(body, a=layer(), bn=nn.BatchNorm2d(6))
    notes, _ = check(net, image(2, 6, 5), name="fold_before", folds=False)
    assert any(note in n for n in notes)


def test_norms_on_both_sides_in_training():
    net = Net(lambda self, x: self.n(self.a(self.m(x))), m=nn.BatchNorm1d(6), a=nn.Linear(6, 4), n=nn.BatchNorm1d(4))
    livened(net)
    x = torch.randn(64, 6)
    model = bw.prepare(net, x, WIDE)
    bw.calibrate(model, [x])
    with torch.no_grad():
        weight, bias = model.a.unfolded()
        assert torch.allclose(F.linear(x, weight, bias), net.a(net.m(x)), atol=2e-3)
        out = net.n.train()(net.a(net.m(x)))
        assert torch.allclose(copy.deepcopy(net.n)(F.linear(x, weight, bias)), out, atol=1e-2)


def test_uneven_factors_stay_before_a_layer():
    def body(self, x):
        return self.a(x / self.ranges)

    net = Net(body, a=nn.Linear(3, 4))
    net.register_buffer("ranges", torch.tensor([1.0, 10.0, 100.0]))
    x = torch.randn(64, 3) * net.ranges
    errors = []
    for recipe in ({}, {"schedules": {"fold_before": {"spread": 1000}}}):
        model = bw.prepare(net, x, recipe=recipe)
        bw.calibrate(model, [x])
        errors.append(float((model(x) - net(x)).detach().pow(2).mean()))
        notes = [n for n in bw.ledger_of(model).notes if n.startswith("fold_before")]
        folded = "fold_before: folded truediv into a after it"
        assert notes == (
            [folded] if recipe else ["fold_before: not folded: truediv into a, its factors differ by up to 100 times"]
        )
    assert errors[0] < errors[1] / 10
