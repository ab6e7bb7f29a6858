"""Which BatchNorms are folded, and what is noted of the others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw


def fold_notes(body, **layers):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, layer in layers.items():
                self.add_module(name, layer)

        def forward(self, x):
            return body(self, x)

    net = Net().eval()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d | nn.BatchNorm1d) and norm.running_mean is not None:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    x = torch.randn(2, 3, 6, 6)
    model = bw.prepare(net, x, recipe={"schedules": {"norm_to_convolution": False}})
    with torch.no_grad():
        assert torch.equal(model(x), net(x))
    notes = bw.ledger_of(model).notes
    return [n.removeprefix("fold_batchnorm: ") for n in notes if n.startswith("fold_batchnorm: ")], model, net


def test_folding_notes():
    norm = nn.BatchNorm2d
    notes, model, net = fold_notes(
        lambda self, x: self.b(self.a(x)), a=nn.Conv2d(3, 4, 1), b=norm(4, affine=False, eps=0.1)
    )
    assert notes == ["folded b into a"]
    assert model.a.folded_norm is model.b
    weight, bias = model.a.folded_weight()
    factor = 1 / torch.sqrt(net.b.running_var + 0.1)
    assert torch.allclose(weight, net.a.weight * factor.reshape(-1, 1, 1, 1))
    assert torch.allclose(bias, (net.a.bias - net.b.running_mean) * factor)


@pytest.mark.parametrize(
    ("body", "layers", "note"),
    [
        (
            lambda self, x: (lambda y: self.b(y) + y)(self.a(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4)},
            "not folded: b, a before it has 2 users",
        ),
        (
            lambda self, x: self.b(self.a(x)) + self.b(self.c(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4), "c": nn.Conv2d(3, 4, 1)},
            "not folded: b, it or the layer before it is called more than once",
        ),
        (
            lambda self, x: self.b(self.a(x)) + self.a(x),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4)},
            "not folded: b, it or the layer before it is called more than once",
        ),
        (
            lambda self, x: self.b(torch.relu(self.a(x))),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4)},
            "not folded: b, relu before it is not a quantized layer with a weight",
        ),
        (
            lambda self, x: self.b(self.r(self.a(x))),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4), "r": nn.ReLU()},
            "not folded: b, r before it is not a quantized layer with a weight",
        ),
        (
            lambda self, x: self.a(self.b(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(3)},
            "not folded: b, x before it is not a quantized layer with a weight",
        ),
        (
            lambda self, x: self.b(self.a(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4, track_running_stats=False)},
            "not folded: b, it has no running statistics",
        ),
        (
            lambda self, x: self.b(self.a(x.flatten(2))),
            lambda: {"a": nn.Linear(36, 5), "b": nn.BatchNorm1d(3)},
            "not folded: b, it normalises an axis other than the one the linear layer produces",
        ),
        (
            lambda self, x: self.b(self.a(x.flatten(1))),
            lambda: {"a": nn.Linear(108, 5), "b": nn.BatchNorm1d(5)},
            "folded b into a",
        ),
        (
            lambda self, x: self.b(input=self.a(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1, groups=1, bias=False), "b": nn.BatchNorm2d(4)},
            "folded b into a",
        ),
    ],
)
def test_when_a_norm_is_folded(body, layers, note):
    notes, _, _ = fold_notes(body, **layers())
    assert note in notes


@pytest.mark.parametrize("groups", [1, 2])
def test_a_norm_folds_into_a_transposed_convolution(groups):
    notes, model, net = fold_notes(
        lambda self, x: self.b(self.a(self.c(x))),
        c=nn.Conv2d(3, 4, 1),
        a=nn.ConvTranspose2d(4, 6, 2, stride=2, groups=groups),
        b=nn.BatchNorm2d(6),
    )
    assert notes == ["folded b into a"]
    x = torch.randn(2, 4, 5, 5)
    weight, bias = model.a.folded_weight()
    folded = F.conv_transpose2d(x, weight, bias, stride=2, groups=groups)
    assert torch.allclose(folded, net.b(net.a(x)), atol=1e-5)
    y = torch.randn(2, 3, 6, 6)
    bw.calibrate(model, [y])
    assert float((model(y) - net(y)).detach().pow(2).mean()) < 0.01 * float(net(y).detach().pow(2).mean())


def test_training_still_moves_the_statistics_of_a_folded_norm():
    _, model, net = fold_notes(lambda self, x: self.b(self.a(x)), a=nn.Conv2d(3, 4, 1), b=nn.BatchNorm2d(4))
    x = torch.randn(4, 3, 6, 6)
    assert torch.equal(model.train()(x), net.train()(x))
    assert torch.equal(model.b.running_mean, net.b.running_mean)
    assert int(model.b.num_batches_tracked) == 1
