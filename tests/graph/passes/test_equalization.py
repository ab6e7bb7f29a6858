"""Cross-layer equalization: the same function, channels with equal ranges in both layers, and less error per tensor."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError
from tests.graph.passes.nets import Net, notes_of

NAME = "cross_layer_equalization"


def uneven(net):
    """Channels whose ranges differ by orders of magnitude, and statistics that are not trivial."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear | nn.ConvTranspose2d):
            scale = torch.logspace(-1.5, 1.5, module.weight.shape[0])
            module.weight.data *= scale.reshape(-1, *[1] * (module.weight.ndim - 1))
        elif isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
    return net.eval()


def equalized(net, *examples, **options):
    """Prepare with equalization in debug mode; the function stays the same up to rounding."""
    before = {k: v.clone() for k, v in net.state_dict().items()}
    model = bw.prepare(net, examples[0], recipe={"schedules": {NAME: options or True}}, debug=True)
    for x in examples:
        with torch.no_grad():
            expected = net(x)
            torch.testing.assert_close(model(x), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())  # the user's model is untouched
    return notes_of(model, NAME), model


def folded(layer):
    return layer.folded_weight()[0].abs()


def image(batch=2):
    return torch.randn(batch, 3, 8, 8)


def test_ranges_are_equal_afterwards():
    net = uneven(
        Net(
            lambda self, x: self.c(F.relu(self.b(F.leaky_relu(self.bn(self.a(x)), 0.1)))),
            a=nn.Conv2d(3, 6, 3, padding=1, bias=False),
            bn=nn.BatchNorm2d(6),
            b=nn.Conv2d(6, 8, 3, padding=1),
            c=nn.Conv2d(8, 4, 1),
        )
    )
    notes, model = equalized(net, image(), image(5), iterations=100)
    assert [n.split(",")[0] for n in notes] == ["equalized a with b", "equalized b with c"]
    for first, second in ((model.a, model.b), (model.b, model.c)):
        ranges = folded(first).flatten(1).amax(1), folded(second).flatten(2).amax(2).amax(0)
        assert torch.allclose(*ranges, rtol=0.02)


def test_one_step_is_the_formula():
    net = uneven(Net(lambda self, x: self.b(F.relu(self.a(x))), a=nn.Linear(5, 6), b=nn.Linear(6, 4)))
    _, model = equalized(net, torch.randn(3, 5), iterations=1)
    r1, r2 = net.a.weight.abs().amax(1), net.b.weight.abs().amax(0)
    s = (r1 * r2).sqrt() / r2
    assert torch.allclose(model.a.weight, net.a.weight / s[:, None])
    assert torch.allclose(model.a.bias, net.a.bias / s)
    assert torch.allclose(model.b.weight, net.b.weight * s)


@pytest.mark.parametrize(
    ("first", "second", "between"),
    [
        (lambda: nn.Conv2d(3, 6, 3), lambda: nn.Conv2d(6, 6, 3, groups=6), F.relu),
        (lambda: nn.Conv2d(3, 6, 3), lambda: nn.Conv2d(6, 4, 3, groups=2), nn.PReLU(6)),
        (lambda: nn.ConvTranspose2d(3, 6, 2, groups=3), lambda: nn.Conv2d(6, 4, 3), lambda x: x),
        (
            lambda: nn.Conv2d(3, 6, 3),
            lambda: nn.ConvTranspose2d(6, 4, 2, groups=2),
            lambda x: F.max_pool2d(x, 2).relu(),
        ),
        (lambda: nn.Conv2d(3, 6, 3), lambda: nn.Conv2d(6, 4, 1), lambda x: F.adaptive_avg_pool2d(F.relu(x), 1)),
    ],
)
def test_layers_of_many_kinds(first, second, between):
    net = uneven(Net(lambda self, x: self.b(self.between(self.a(x))), a=first(), b=second(), between=between))
    notes, _ = equalized(net, image(), image(3))
    assert len(notes) == 1
    assert notes[0].startswith("equalized a with b")


@pytest.mark.parametrize(
    ("body", "layers", "reason"),
    [
        (lambda self, x: (lambda y: self.b(y) + y.mean())(F.relu(self.a(x))), {}, "relu has 2 users"),
        (lambda self, x: self.b(F.relu(self.a(x))) + self.a(x).mean(), {}, "a is called more than once"),
        (lambda self, x: self.b(F.relu(self.a(x))) + self.a.weight.mean(), {}, "a.weight is read by something else"),
        (
            lambda self, x: self.b(F.relu(self.n(self.a(x)))),
            {"n": lambda: nn.BatchNorm2d(6, affine=False)},
            "the norm between them has no weight to take the factor",
        ),
        (lambda self, x: self.b(self.a(x).transpose(1, 3)), {}, None),
        (lambda self, x: self.b(F.gelu(self.a(x))), {}, None),
        (lambda self, x: self.b(F.relu6(self.a(x))), {}, None),
    ],
)
def test_near_misses(body, layers, reason):
    net = Net(body, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 4, 1), **{k: make() for k, make in layers.items()})
    notes, model = equalized(uneven(net), image())
    assert notes == ([f"not equalized: a with b, {reason}"] if reason else [])
    assert torch.equal(model.a.weight, net.a.weight)


def test_shared_parameters_and_hooks_are_refused():
    net = Net(lambda self, x: self.b(F.relu(self.a(x))) + self.c(x).mean(), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    net.c = nn.Linear(6, 6)
    net.c.weight = net.a.weight
    notes, _ = equalized(uneven(net), torch.randn(2, 6))
    assert notes == ["not equalized: a with b, a shares parameters with another layer"]
    net = Net(lambda self, x: self.b(F.relu(self.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    net.a.register_forward_hook(lambda m, a, out: out)
    notes, _ = equalized(uneven(net), torch.randn(2, 6))
    assert notes == ["not equalized: a with b, one of them has hooks"]


def test_relu6_on_request():
    net = uneven(
        Net(lambda self, x: self.b(self.r(self.a(x))), a=nn.Conv2d(3, 6, 3), r=nn.ReLU6(), b=nn.Conv2d(6, 4, 1))
    )
    recipe = {"schedules": {NAME: {"relu6": True}}}
    model = bw.prepare(net, image(), recipe=recipe)
    assert not torch.allclose(model.a.weight, net.a.weight)


def test_refusals():
    net = Net(lambda self, x: self.a(x), a=nn.Linear(6, 6))
    with pytest.raises(ConfigError, match="iterations must be 1 or more, not 0"):
        bw.prepare(net, torch.randn(2, 6), recipe={"schedules": {NAME: {"iterations": 0}}})


def test_it_is_off_by_default_and_helps_weights_with_one_scale():
    class Separable(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.n = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
            self.b, self.m = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
            self.c = nn.Conv2d(8, 4, 1)

        def forward(self, x):
            x = F.relu(self.n(self.a(x)))
            return self.c(F.relu(self.m(self.b(x))))

    net, x = uneven(Separable()), image(8)
    assert not any(n.startswith(NAME) for n in bw.ledger_of(bw.prepare(net, x)).notes)
    errors = []
    for switch in (False, True):
        model = bw.prepare(
            net,
            x,
            recipe={"schedules": {NAME: switch}, "weight": "int8 narrow tensor", "activation": "uint8 affine tensor"},
        )
        bw.calibrate(model, [x])
        with torch.no_grad():
            errors.append(float((model(x) - net(x)).pow(2).mean()))
    assert errors[1] < errors[0] / 4


def test_a_residual_net():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 6, 3, padding=1)
            self.a, self.n, self.b = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            x = F.relu(self.stem(x))
            x = F.relu(x + self.b(F.relu(self.n(self.a(x)))))
            return self.head(x.mean((2, 3)))

    notes, _ = equalized(uneven(Residual()), image(), image(1))
    assert [n.split(", by")[0] for n in notes] == [
        "not equalized: stem with a, relu has 2 users",
        "equalized a with b",
    ]
