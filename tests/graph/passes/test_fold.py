"""Folding into layers: norms after and before them, functional and shuffled ones, and constants.

Everywhere the prepared model equals the original bit for bit while quantizers are off, and the folded weight computes
the same as the original operations.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bitwright as bw
from bitwright.backends import BACKENDS
from bitwright.spec import QuantSpec
from tests.graph.passes.nets import FrozenNorm, Net, notes_of, shuffle_channels


def livened(net):
    """Give norms statistics and parameters that are not the trivial ones."""
    for norm in net.modules():
        if isinstance(getattr(norm, "running_var", None), torch.Tensor):
            norm.running_mean.normal_(0, 0.5)
            norm.running_var.uniform_(0.3, 2.0)
            if getattr(norm, "weight", None) is not None:
                nn.init.uniform_(norm.weight, 0.3, 1.5)
                nn.init.normal_(norm.bias, 0, 0.5)
    return net.eval()


def check(net, *examples, name, layer="a", folds=True, steady=True):
    """Prepare; compare off bit for bit, and with 16-bit quantizers within what those round; return notes and model."""
    torch.manual_seed(1)
    livened(net)
    model = bw.prepare(net, examples[0], debug=True)
    with torch.no_grad():
        for x in examples:
            assert torch.equal(model(x), net(x))
        fine = bw.prepare(net, examples[0], WIDE)
        bw.calibrate(fine, list(examples))
        for x in examples if steady else ():
            assert torch.allclose(fine(x), net(x), atol=2e-3 * float(net(x).abs().max()))
    notes = notes_of(model, name)
    assert any(not n.startswith("not") for n in notes) is folds
    if layer is not None:
        assert type(model.get_submodule(layer)).__name__.startswith("Quant")
    return notes, model


def _wide():
    return replace(
        BACKENDS.get("openvino"),
        name="wide",
        weight=QuantSpec.parse("int16 symmetric narrow channel:0"),
        activation=QuantSpec.parse("int16 affine tensor"),
        weight_formats=frozenset(),
        activation_formats=frozenset(),
    )


WIDE = _wide()


def image(batch=2, channels=3, size=6):
    return torch.randn(batch, channels, size, size)


# ------------------------------------------------------------------------------------------------------ batch norms


class OwnNorm(nn.BatchNorm2d):
    """A norm with a forward of its own, as model libraries have them: it calls the function and an activation."""

    def forward(self, x):
        y = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.relu(y)


@pytest.mark.parametrize(
    ("layer", "norm", "x"),
    [
        (lambda: nn.Conv1d(3, 4, 3, padding=1), lambda: nn.BatchNorm1d(4), (2, 3, 9)),
        (lambda: nn.Conv3d(3, 4, 3), lambda: nn.BatchNorm3d(4), (2, 3, 5, 5, 5)),
        (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), lambda: nn.BatchNorm1d(6), (2, 4, 9)),
        (lambda: nn.ConvTranspose3d(3, 4, 2, stride=2), lambda: nn.BatchNorm3d(4), (2, 3, 3, 3, 3)),
        (lambda: nn.Linear(6, 4, bias=False), lambda: nn.BatchNorm1d(4, affine=False), (5, 6)),
        (lambda: nn.Conv2d(4, 8, 3, groups=4, padding="same"), lambda: OwnNorm(8), (2, 4, 6, 6)),
        (lambda: nn.Conv2d(4, 8, 3, groups=4), lambda: nn.SyncBatchNorm(8), (2, 4, 6, 6)),
    ],
)
def test_norms_of_every_kind(layer, norm, x):
    net = Net(lambda self, x: self.b(self.a(x)), a=layer(), b=norm())
    notes, model = check(net, torch.randn(x), torch.randn(3, *x[1:]), name="fold_batchnorm")
    assert len(notes) == 1
    assert notes[0].startswith("folded")
    assert "folded into the layer before it" in {e.reason for e in bw.ledger_of(model).entries}


def test_a_norm_with_its_own_forward_trains_and_loads_as_before():
    net = livened(Net(lambda self, x: self.b(self.a(x)), a=nn.Conv2d(3, 4, 1), b=OwnNorm(4)))
    model = bw.prepare(net, image())
    assert {k for k in model.state_dict() if "quantizer" not in k} == set(net.state_dict())
    other = {k: torch.rand_like(v) if v.is_floating_point() else v for k, v in net.state_dict().items()}
    for each in (net, model):
        each.load_state_dict(other, strict=False)
    x = image(5)
    with torch.no_grad():
        assert torch.equal(model(x), net(x))
        assert torch.equal(copy.deepcopy(model)(x), net(x))
        model.train()(x)
    net.train()(x)
    assert torch.allclose(model.b.running_mean, net.b.running_mean)
    assert torch.allclose(model.b.running_var, net.b.running_var)


def test_a_frozen_norm_stays_frozen_in_training():
    def body(self, x):
        return F.batch_norm(self.a(x), self.mean, self.var, self.gain, None, False, 0.0, 1e-3)

    net = Net(body, a=nn.Conv2d(3, 4, 1))
    net.register_buffer("mean", torch.randn(4))
    net.register_buffer("var", torch.rand(4) + 0.5)
    net.gain = nn.Parameter(torch.rand(4) + 0.5)
    notes, model = check(net, image(), image(3), name="fold_batchnorm")
    assert notes == ["folded batch_norm into a"]
    before = model.mean.clone()
    model.train()(image(4)).sum().backward()
    assert torch.equal(model.mean, before)
    assert float(model.gain.grad.abs().max()) > 0
    bw.calibrate(model, [image(4)])
    model.gain.grad = None
    model(image(4)).pow(2).sum().backward()
    assert float(model.gain.grad.abs().max()) > 0  # through the folded weight


def test_a_layer_called_twice_with_its_norm():
    def body(self, x):
        return self.b(self.a(x)) + self.b(self.a(x * 0.5)).relu()

    notes, model = check(Net(body, a=nn.Conv2d(3, 4, 1), b=nn.BatchNorm2d(4)), image(), image(3), name="fold_batchnorm")
    assert notes == ["folded b into a"]
    assert not [n for n in model.graph.nodes if n.target == "b"]


@pytest.mark.parametrize(
    "shuffle",
    [
        lambda x: shuffle_channels(x, 2),
        lambda x: F.channel_shuffle(x, 4),
        lambda x: x.unflatten(1, (4, 2)).permute(0, 2, 1, 3, 4).flatten(1, 2),
        lambda x: x.flip(1),
        lambda x: x.roll(3, 1),
    ],
)
def test_a_norm_after_a_channel_shuffle(shuffle):
    net = Net(lambda self, x: self.b(shuffle(self.a(x))), a=nn.Conv2d(4, 8, 3, groups=2), b=nn.BatchNorm2d(8))
    notes, model = check(net, image(2, 4), image(3, 4), name="fold_batchnorm")
    assert notes == ["folded b into a through the channel shuffle between them"]
    x = image(4, 4)
    assert torch.equal(model.train()(x), net.train()(x))
    assert torch.equal(model.b.running_var, net.b.running_var)


@pytest.mark.parametrize(
    ("between", "note"),
    [
        (lambda x: x.transpose(2, 3), "transpose before it is not a quantized layer with a weight"),
        (lambda x: x.flatten(1).view(2, 8, 4, 4).relu(), "relu before it is not a quantized layer with a weight"),
        (lambda x: x.permute(0, 2, 1, 3), "permute before it is not a quantized layer with a weight"),
        (lambda x: x.flip(2), "flip before it is not a quantized layer with a weight"),
    ],
)
def test_what_is_no_channel_shuffle(between, note):
    net = Net(lambda self, x: self.b(between(self.a(x))), a=nn.Conv2d(4, 4 if "permute" in note else 8, 3), b=None)
    net.b = nn.BatchNorm2d(4 if "permute" in note else 8)
    notes, _ = check(net, image(2, 4), name="fold_batchnorm", folds=False)
    assert notes == [f"not folded: b, {note}"]


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ((None, None, None, None, True), "it normalises by the statistics of the batch"),
        (("x", "one", None, None, False), "its running_mean is computed from the input"),
    ],
)
def test_functional_norms_that_stay(arguments, note):
    def body(self, x):
        tensors = {"x": x.mean((0, 2, 3)).repeat(2)[:4], "one": torch.ones(4), None: None}
        return F.batch_norm(self.a(x), *(tensors.get(a, a) if not isinstance(a, bool) else a for a in arguments))

    notes, _ = check(Net(body, a=nn.Conv2d(3, 4, 1)), image(), name="fold_batchnorm", folds=False)
    assert notes == [f"not folded: batch_norm, {note}"]


# ----------------------------------------------------------------------------------------------------------- scales


def with_gain(body, shape=(4,), **layers):
    net = Net(body, **layers)
    net.gain = nn.Parameter(torch.rand(shape) + 0.5)
    return net


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
            "its constant differs along other axes than the layer's channels",
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


# ---------------------------------------------------------------------------------------------------- before a layer


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
        (lambda self, x: self.a(x + 1.0), lambda: nn.ConvTranspose2d(6, 4, 3), "does not see its shift"),
        (
            lambda self, x: self.a((lambda y: y)(self.bn(x))) + self.bn(x).sum(),
            lambda: nn.Conv2d(6, 4, 1),
            "more than once",
        ),
        (lambda self, x: (lambda y: self.a(y) + y.sum())(self.bn(x)), lambda: nn.Conv2d(6, 4, 1), "it has 2 users"),
        (lambda self, x: self.a(self.bn(x)), lambda: nn.Linear(5, 4), "another axis"),
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
            [folded] if recipe else ["fold_before: not folded: truediv into a, its factors differ 100 times"]
        )
    assert errors[0] < errors[1] / 10


# ------------------------------------------------------------------------------------------------------- end to end


class Block(nn.Module):
    """A residual block with a norm, layer scale and a shortcut that is a layer too."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), OwnNorm(channels)
        self.point = nn.Conv2d(channels, channels, 1)
        self.gain = nn.Parameter(torch.full((channels, 1, 1), 0.3))

    def forward(self, x):
        return x + self.gain * self.point(self.norm(self.conv(x)))


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_the_file_computes_what_the_simulation_does(backend, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 8, 1),
        Block(8),
        Block(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(8, 4),
    )
    livened(net)
    x = image(4)
    model = bw.prepare(net, x, backend)
    assert not [e.name for e in bw.ledger_of(model).entries if e.verdict.value == "float"]
    bw.calibrate(model, [x, image(4)])
    bw.export(model, tmp_path / "net.onnx")
    proof = bw.verify(model, tmp_path / "net.onnx", [image(3)], latency=False)
    assert proof.ok, str(proof)
