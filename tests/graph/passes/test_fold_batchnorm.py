"""Folding norms into the layer before them: modules, functions, shuffled channels; and what the file computes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from tests.graph.passes.folding import OwnNorm, check, image, livened
from tests.graph.passes.nets import Net, shuffle_channels


@pytest.mark.parametrize(
    ("layer", "norm", "x"),
    [
        (lambda: nn.Conv1d(3, 4, 3, padding=1), lambda: nn.BatchNorm1d(4), (2, 3, 9)),
        (lambda: nn.Conv3d(3, 4, 3), lambda: nn.BatchNorm3d(4), (2, 3, 5, 5, 5)),
        (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), lambda: nn.BatchNorm1d(6), (2, 4, 9)),
        (lambda: nn.ConvTranspose3d(3, 4, 2, stride=2), lambda: nn.BatchNorm3d(4), (2, 3, 3, 3, 3)),
        (lambda: nn.Linear(6, 4, bias=False), lambda: nn.BatchNorm1d(4, affine=False), (5, 6)),
        (lambda: nn.Conv2d(4, 8, 3, groups=2, padding="same"), lambda: OwnNorm(8), (2, 4, 6, 6)),
        (lambda: nn.Conv2d(4, 8, 3, groups=2), lambda: nn.SyncBatchNorm(8), (2, 4, 6, 6)),
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
        (lambda x: x.flatten(1).view(2, 8, 4, 4).tanh(), "tanh before it is not a quantized layer with a weight"),
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
        ((None, None, None, None, True), "it normalises by batch statistics"),
        (("x", "one", None, None, False), "its running_mean is computed from the input"),
    ],
)
def test_functional_norms_that_stay(arguments, note):
    def body(self, x):
        tensors = {"x": x.mean((0, 2, 3)).repeat(2)[:4], "one": torch.ones(4), None: None}
        return F.batch_norm(self.a(x), *(tensors.get(a, a) if not isinstance(a, bool) else a for a in arguments))

    notes, _ = check(Net(body, a=nn.Conv2d(3, 4, 1)), image(), name="fold_batchnorm", folds=False)
    assert notes == [f"not folded: batch_norm, {note}"]


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
