"""Folds as values on a layer: what each computes, what it is as a map of channels, and what stays the user's."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError
from bitwright.nn.fold import ArithmeticFold, FunctionFold, NormFold, ShuffledFold, apply_all, combine
from bitwright.quantizer import quantizers
from tests.graph.passes.nets import Net, shuffle_channels

CHANNELS = 6


def lively(norm):
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.3, 2.0)
    if norm.weight is not None:
        nn.init.normal_(norm.weight)  # negative factors too
        nn.init.normal_(norm.bias)
    return norm.eval()


class OwnNorm(nn.BatchNorm2d):
    """A norm with its own forward, which capture traces into."""

    def forward(self, x):
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )


def folds():
    torch.manual_seed(0)
    norm, values = lively(nn.BatchNorm2d(CHANNELS)), torch.randn(CHANNELS)
    tensors = [lambda t=t: t for t in (norm.running_mean, norm.running_var, norm.weight)]
    made = {
        "norm": NormFold(norm),
        "norm without weight": NormFold(lively(nn.BatchNorm2d(CHANNELS, affine=False))),
        "call": FunctionFold(*tensors, None, 0.1, 1e-3),
        "shuffled": ShuffledFold(NormFold(norm), torch.randperm(CHANNELS)),
    }
    for function, first in itertools.product((torch.add, torch.sub, torch.mul, torch.div), (False, True)):
        if function is not torch.div or not first:
            made[f"{function.__name__} {first}"] = ArithmeticFold(function, lambda: values, first, -3)
            made[f"{function.__name__} {first} number"] = ArithmeticFold(function, 1.5, first, -3)
    return made


@pytest.mark.parametrize("name", folds())
def test_every_fold_is_the_map_of_channels_that_it_says(name):
    fold, x = folds()[name], torch.randn(3, CHANNELS, 4, 4)
    factor, shift = fold.affine(CHANNELS, x)
    assert factor.shape == (CHANNELS,)
    expected = x * factor.reshape(-1, 1, 1) + (0 if shift is None else shift.reshape(-1, 1, 1))
    assert torch.allclose(fold.apply(x), expected, atol=1e-5)
    assert (shift is None) == name.startswith(("mul", "div"))


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_is_one_map(seed):
    torch.manual_seed(seed)
    made = list(folds().values())
    chain = tuple(made[i] for i in torch.randint(0, len(made), (4,)))
    x = torch.randn(3, CHANNELS, 4, 4, dtype=torch.float64)
    chain = tuple(f for f in chain if not isinstance(f, NormFold | ShuffledFold | FunctionFold)) or (made[-1],)
    factor, shift = combine(chain, CHANNELS, x)
    expected = x * factor.reshape(-1, 1, 1) + (0 if shift is None else shift.reshape(-1, 1, 1))
    assert torch.allclose(apply_all(chain, x), expected)


def test_a_norm_without_statistics_says_so():
    with pytest.raises(ConfigError, match="BatchNorm2d without running statistics"):
        NormFold(nn.BatchNorm2d(3, track_running_stats=False)).affine(3, torch.ones(1))


def test_folding_adds_no_modules_and_changes_no_classes():
    def body(self, x):
        return self.n(shuffle_channels(self.a(self.m(x)))) * self.gain + F.relu(self.o(self.b(x))) + 1.0

    net = Net(body, m=nn.BatchNorm2d(4), a=nn.Conv2d(4, 8, 1), n=nn.BatchNorm2d(8), b=nn.Conv2d(4, 8, 1), o=OwnNorm(8))
    net.gain = nn.Parameter(torch.rand(8, 1, 1))
    for norm in (net.m, net.n, net.o):
        lively(norm)
    nn.init.uniform_(net.m.weight, 0.5, 1.5)
    x = torch.randn(2, 4, 6, 6)
    model = bw.prepare(net.eval(), x)
    assert [len(model.a.before), len(model.a.after), len(model.b.after)] == [1, 1, 1]
    added = {n for n, _ in model.named_modules()} - {n for n, _ in net.named_modules()}
    assert [n for n in added if "quantizer" not in n] == ["bitwright"]
    assert {type(model.a), type(model.b)} == {bw.nn.QuantConv2d}
    assert {k for k in model.state_dict() if "quantizer" not in k} == set(net.state_dict())
    assert torch.equal(model(x), net(x))


def both(shuffled):
    if shuffled:
        net = Net(lambda self, x: self.n(F.channel_shuffle(self.a(x), 2)), a=nn.Conv2d(4, 8, 1), n=nn.BatchNorm2d(8))
    else:
        net = Net(lambda self, x: self.n(self.a(x)), a=nn.Conv2d(4, 8, 1), n=OwnNorm(8))
    lively(net.n)
    x = torch.randn(4, 4, 6, 6)
    return bw.calibrate(bw.prepare(net.eval(), x), [x]), x


def moves(model, x):
    before = model.n.running_mean.clone()
    with torch.no_grad():
        model(x)
    return not torch.equal(before, model.n.running_mean)


@pytest.mark.parametrize("shuffled", [True, False])
def test_any_folded_norm_is_frozen_and_unfrozen_by_its_layer(shuffled):
    model, x = both(shuffled)
    assert not moves(model.train(), x)
    bw.unfreeze_batchnorm(model.a)
    assert moves(model, x)
    bw.freeze_batchnorm(model.a)
    assert not moves(model.train(), x)
    bw.unfreeze_batchnorm(model)
    assert moves(model.train(), x)
    assert not moves(model.eval(), x)


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_frozen_norm_stays_frozen_while_quantizers_are_off(shuffled):
    model, x = both(shuffled)
    for quantizer in quantizers(model).values():
        quantizer.off()
    assert moves(model.train(), x)
    bw.freeze_batchnorm(model)
    assert not moves(model.train(), x)


def test_a_copy_folds_its_own_norm():
    model, _ = both(shuffled=True)
    twin = copy.deepcopy(model)
    assert twin.a.folded_norm is twin.n
    assert twin.n is not model.n
    with torch.no_grad():
        twin.n.bias.add_(1.0)
    assert torch.allclose(twin.a.folded_weight()[1], model.a.folded_weight()[1] + 1.0)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_a_layer_with_folds_compiles(shuffled, train):
    model, x = both(shuffled)
    layer = bw.unfreeze_batchnorm(model.train(train)).a
    twin = copy.deepcopy(model).a
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_a_zero_factor_folds():
    net = Net(lambda self, x: self.n(self.a(x)), a=nn.Linear(4, 3), n=nn.BatchNorm1d(3))
    lively(net.n)
    with torch.no_grad():
        net.n.weight[1] = 0.0
    x = torch.randn(16, 4)
    model = bw.calibrate(bw.prepare(net.eval(), x), [x])
    assert torch.allclose(model(x)[:, 1], net.n.bias[1], atol=0.05)
    out = bw.unfreeze_batchnorm(model.train())(x)
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert torch.isfinite(model.a.weight.grad).all()
