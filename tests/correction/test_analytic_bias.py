"""Biases corrected from BatchNorm statistics, against written-out formulas and against drawn values."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.correction.moments import Expected, Moments, clipped, integrated
from bitwright.errors import ConfigError
from tests.correction.nets import Net, calibrated, data, trained

MEANS, SPREADS = torch.tensor([-1.5, 0.0, 0.4, 3.0, 7.0]).double(), torch.tensor([1.0, 0.5, 2.0, 2.5, 0.1]).double()


@pytest.mark.parametrize(("low", "high"), [(0.0, None), (0.0, 6.0), (-1.0, 1.0), (None, 2.0), (None, None)])
def test_moments_of_a_clamped_normal_value(low, high):
    drawn = torch.randn(400_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = (MEANS + drawn * SPREADS).clamp(-math.inf if low is None else low, math.inf if high is None else high)
    found = clipped(Moments(MEANS, SPREADS.square(), -1), low, high)
    assert found.var is not None
    assert torch.allclose(found.mean, values.mean(0), atol=0.02)  # 4 standard errors of the widest
    assert torch.allclose(found.var, values.var(0), atol=0.06)


def test_a_relu_by_the_textbook():
    found = clipped(Moments(MEANS, SPREADS.square(), -1), 0.0, None)
    for mean, std, wanted in zip(MEANS.tolist(), SPREADS.tolist(), found.mean.tolist(), strict=True):
        below = 0.5 * math.erfc(mean / std / math.sqrt(2))  # Φ(-β/γ)
        density = math.exp(-((mean / std) ** 2) / 2) / math.sqrt(2 * math.pi)
        assert wanted == pytest.approx(mean * (1 - below) + std * density, abs=1e-12)


def test_a_value_without_spread():
    found = clipped(Moments(torch.tensor([-1.0, 2.0]).double(), torch.zeros(2).double(), -1), 0.0, 1.5)
    assert torch.equal(found.mean, torch.tensor([0.0, 1.5]).double())
    assert torch.allclose(found.var, torch.zeros(2).double(), atol=1e-12)


def test_other_activations_are_integrated():
    normal = Moments(MEANS, SPREADS.square(), -1)
    by_formula, by_sum = clipped(normal, 0.0, 6.0), integrated(normal, F.relu6)
    assert torch.allclose(by_formula.mean, by_sum.mean, atol=1e-4)
    assert torch.allclose(by_formula.var, by_sum.var, atol=1e-3)
    drawn = torch.randn(400_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(integrated(normal, F.silu).mean, F.silu(MEANS + drawn * SPREADS).mean(0), atol=0.02)


class Pair(nn.Module):
    """Two convolutions and everything that is usually between them."""

    def __init__(self, act: nn.Module, padding: int = 0) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), act)
        self.two = nn.Conv2d(8, 6, 3, padding=padding, groups=2)

    def forward(self, x):
        return self.two(self.one(x))


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6()])
def test_the_shift_is_the_formula(act):
    model = calibrated(trained(Pair(act)), 2)
    norm, layer, before = model.one[1], model.two, model.two.bias.detach().clone()
    mean, std = (
        norm.bias.detach(),
        norm.weight.detach().abs() * (norm.running_var / (norm.running_var + norm.eps)).sqrt(),
    )
    expected = clipped(
        Moments(mean.double(), std.double().square(), -1), 0.0, 6.0 if isinstance(act, nn.ReLU6) else None
    )
    weight = layer.weight.detach()
    error = (layer.weight_quantizer.fake_quantize(weight) - weight).sum((2, 3)).double()
    inputs = expected.mean.reshape(2, 4).repeat_interleave(3, 0)  # each group of three outputs reads four inputs
    done = bw.correct_bias_analytically(model)
    assert torch.allclose(layer.bias - before, -(error * inputs).sum(1).float(), atol=1e-5)
    assert done.changed == {"two": pytest.approx(float((error * inputs).sum(1).abs().max()), rel=1e-4)}
    assert done.skipped == {"one.0": "no BatchNorm says what its input is on average"}
    assert max(bw.correct_bias_analytically(model).changed.values()) < 1e-5  # a second time changes nothing


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("act", [nn.ReLU(), nn.SiLU()])
def test_means_of_drawn_data_agree(act, padding):
    """Normal inputs make normal sums, so the expectation is met, apart from chance."""
    source = torch.Generator().manual_seed(3)
    batches = [torch.randn(256, 3, 10, 10, generator=source) for _ in range(2)]
    net = Pair(act, padding)
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0.3)
    net.one[1].momentum = None
    with torch.no_grad():
        net.train()(torch.cat(batches))
    float_net = copy.deepcopy(net).eval()
    rules = [{"match": "one.0", "weight": "int8 symmetric channel:0"}]  # its input is not known: what it gives shall be
    model = calibrated(net.eval(), 2, batches, rules=rules)

    def gap():
        with torch.no_grad():
            return torch.cat([model(x) - float_net(x) for x in batches]).mean((0, 2, 3)).abs().max()

    before = gap()
    bw.correct_bias_analytically(model)
    assert gap() < 0.05 * before


def test_through_sums_and_averages():
    model = calibrated(trained(Net()), 2)
    done = bw.correct_bias_analytically(model)
    assert set(done.changed) == {"deep.0", "wide.0", "side", "fc"}
    known = Expected(model)
    pooled = next(n for n in model.graph.nodes if n.name == "mean")
    assert torch.allclose(known.of(pooled).mean, model.norm.bias.double())
    assert known.of(pooled).var is None


def test_by_recipe_and_after_other_steps():
    recipe = {"preset": "W4A8", "correct": ["gptq", "norms", "analytic_bias"]}
    model = bw.calibrate(bw.prepare(trained(), data()[0], recipe=recipe), data())
    done = bw.correct(model, data())
    assert [each.step for each in done] == ["gptq", "reestimate_norms", "correct_bias_analytically"]
    assert done[2].changed
    assert max(bw.correct_bias_analytically(model).changed.values()) < 1e-3
    with pytest.raises(ConfigError, match="analytic_bias"):
        bw.Recipe.parse({"correct": ["analytic"]})


def test_layers_that_are_called_twice_are_left_alone():
    class Twice(Pair):
        def forward(self, x):
            return self.two(self.one(x)) + self.two(self.one(x))

    done = bw.correct_bias_analytically(calibrated(trained(Twice(nn.ReLU())), 2))
    assert done.skipped["two"] == "it is called 2 times"
