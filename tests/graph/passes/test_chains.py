"""Chains without requantization: what only moves values shares one quantizer, and activations join operators."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from tests.graph.passes.nets import shuffle_channels


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between, first, second):
        super().__init__()
        self.between, self.first, self.second = between, first, second

    def forward(self, x):
        return self.second(self.between(F.relu(self.first(x))))


def placed(model):
    """Which tensors are quantized, with which quantizer."""
    return [
        (n.args[0].name, n.target.removeprefix("bitwright.quantizers."))
        for n in model.graph.nodes
        if n.op == "call_module" and n.target.startswith("bitwright.quantizers.")
    ]


def close(model, net, x):
    bw.calibrate(model, [x])
    with torch.no_grad():
        expected, got = net(x), model(x)
    return float((got - expected).pow(2).mean()) < 0.01 * float(expected.pow(2).mean())


MOVERS = {
    "pools": lambda x: F.max_pool2d(F.max_pool2d(x, 2), 3, 1, 1),
    "upsample": lambda x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "reshape": lambda x: (
        x.flatten(2).transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[3], -1).permute(0, 3, 1, 2)
    ),
    "shuffle": shuffle_channels,
    "halves": lambda x: x.chunk(2, 1)[1],
    "unbind": lambda x: x.unflatten(1, (2, 4)).unbind(1)[0],
    "roll": lambda x: torch.roll(x, (1, 2), (2, 3)).flip(2),
    "pixels": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "dropped": nn.Sequential(nn.Dropout(0.2), nn.Identity(), nn.MaxPool2d(2)),
}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", MOVERS)
def test_a_chain_has_one_quantizer(name, backend):
    torch.manual_seed(0)
    channels = 4 if name in ("halves", "unbind") else 8
    net = Net(MOVERS[name], nn.Conv2d(3, 8, 3, padding=1), nn.Linear(1, 1)).eval()
    net.second = nn.Conv2d(channels, 4, 1)
    x = torch.randn(2, 3, 8, 8)
    model = bw.prepare(net, x, backend, debug=True)
    names = [tensor for tensor, _ in placed(model)]
    assert names[:2] == ["x", "relu"]
    assert names[2:] in ([], ["second"])  # onnxruntime wants the last result quantized too
    assert model.second.input_quantizer.quantizer is model.bitwright.quantizers.relu
    assert close(model, net, x)


def test_both_halves_of_a_split_share_the_quantizer():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            left, right = self.stem(x).relu().chunk(2, 1)
            return shuffle_channels(torch.cat([self.a(left), self.b(right)], 1))

    torch.manual_seed(0)
    net, x = Branches().eval(), torch.randn(2, 3, 8, 8)
    model = bw.prepare(net, x, debug=True)
    assert model.a.input_quantizer.quantizer is model.b.input_quantizer.quantizer
    assert [t for t, _ in placed(model)] == ["x", "relu", "a", "b", "cat"]
    assert close(model, net, x)
    assert torch.equal(bw.prepare(net, x)(x[:1]), net(x[:1]))


def test_a_concatenation_shares_one_scale_where_the_backend_says_so():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            y = F.relu(self.a(x))
            z = F.relu(self.b(y))
            return self.c(F.max_pool2d(torch.cat([y, z], 1), 2))

    net, x = Dense().eval(), torch.randn(2, 3, 8, 8)
    shared = dict(placed(bw.prepare(net, x, "openvino")))
    assert shared["relu"] == shared["relu_1"] == "relu"
    own = dict(placed(bw.prepare(net, x, "onnxruntime")))
    assert own["relu"] != own["relu_1"] != own["cat"]


# ---------------------------------------------------------------------------------------------------- activations


class Residual(nn.Module):
    """Convolution, sum and activation."""

    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return F.relu(self.b(F.relu6(self.n(self.a(x)))) + x)


def test_activations_join_layers_and_sums():
    net, x = Residual().eval(), torch.randn(2, 3, 8, 8)
    model = bw.prepare(net, x)
    reasons = {e.name: e.reason for e in bw.ledger_of(model).entries if e.verdict.value == "fused"}
    assert reasons == {
        "n": "folded into the layer before it",
        "relu6": "computed with a",
        "relu": "computed with add",
    }
    assert [t for t, _ in placed(model)] == ["x", "relu6", "b", "relu"]


def test_activations_stand_alone_if_told():
    net, x = Residual().eval(), torch.randn(2, 3, 8, 8)
    model = bw.prepare(net, x, recipe={"SCHEDULE": {"DISABLE_UNNECESSARY_QUANT": False}})
    assert [t for t, _ in placed(model)] == ["x", "a", "relu6", "b", "add"]
    assert torch.equal(model(x), net(x))


def test_an_activation_whose_input_others_read_is_noted():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            y = self.a(x)
            return F.relu(y) + y

    model = bw.prepare(Both(), torch.randn(2, 3, 8, 8))
    assert "disable_unnecessary_quant: not joined: relu and a, which has 2 users" in bw.ledger_of(model).notes
