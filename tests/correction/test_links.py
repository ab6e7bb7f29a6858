"""Factors moved between layers: the float model stays, and the quantized one comes nearer to it."""

import copy
import itertools

import onnx
import pytest
import torch
from torch import nn

import bitwright as bw
from benchmarks.accuracy.nets import InvertedResidual, make_uneven, scale_below_limits
from bitwright.correction.links import find_links
from bitwright.correction.outcome import Correction
from bitwright.correction.reference import Original, all_off
from bitwright.correction.running import outputs_apart
from bitwright.correction.trials import Trials
from bitwright.errors import CalibrationError, ConfigError
from bitwright.nn.channel_limit import ChannelLimit
from bitwright.quantizer import quantizers
from tests.correction.nets import Net, calibrated, data, trained


class Chain(nn.Module):
    """An inverted residual whose channels have very different ranges, as depthwise nets do."""

    def __init__(self, act=nn.ReLU) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16), act())
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), act())
        self.two = nn.Sequential(nn.Conv2d(16, 6, 1), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3))

    def forward(self, x):
        return self.two(self.deep(self.one(x)))


def uneven(net):
    """The net with channels of the first norm scaled up, and down again in the next layer."""
    net = trained(net)
    factor = torch.logspace(-1.5, 1.5, 16)
    with torch.no_grad():
        net.one[1].weight *= factor
        net.one[1].bias *= factor
        net.deep[0].weight /= factor.reshape(-1, 1, 1, 1)
        net.deep[1].weight *= factor.flip(0)
        net.deep[1].bias *= factor.flip(0)
        net.two[0].weight /= factor.flip(0).reshape(1, -1, 1, 1)
    return net


def float_gap(model, net):
    """How far the model is from a net with its quantizers off, relative to the largest value."""
    with torch.no_grad():
        wanted = net(bw.ledger_of(model).example.args[0])
        found = Original(model).run(model, bw.ledger_of(model).example)
    return float((found - wanted).abs().max() / wanted.abs().max())


PER_TENSOR = "int6 symmetric tensor"


def test_equalization_wins_back_what_uneven_channels_lose():
    net = uneven(Chain())
    model = calibrated(net, weight=PER_TENSOR)
    before = outputs_apart(model, Original(model), data())
    done = bw.equalize(model, data())
    assert set(done.changed) >= {"one.0 to deep.0", "deep.0 to two.0"}
    after = outputs_apart(model, Original(model), data())
    assert after < 0.1 * before
    assert float_gap(model, net) < 1e-5
    product = 1.0
    for share in done.changed.values():
        product *= share
    assert after == pytest.approx(product * before, rel=1e-3)


def test_a_net_that_fails_in_many_places_is_won_back():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), *(InvertedResidual(8, 8, 1) for _ in range(4)))
    batches = [torch.randn(32, 3, 8, 8) for _ in range(2)]
    for batch in batches * 3:
        net.train()(batch)
    net = make_uneven(net.eval(), seed=0)
    model = calibrated(net, weight="int4 symmetric channel:0", batches=batches)
    before = outputs_apart(model, Original(model), batches)
    alone = copy.deepcopy(model)
    bw.equalize(model, batches, rounds=1)
    after = outputs_apart(model, Original(model), batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trials, "together", lambda *_: 1.0)
        bw.equalize(alone, batches, rounds=1)
    assert after < 0.1 * before
    assert after < 0.5 * outputs_apart(alone, Original(alone), batches)
    assert float_gap(model, net) < 1e-4


def test_one_pair_by_the_formula():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    with torch.no_grad():
        net[0].weight[2] *= 100
        net[2].weight[:, 2] /= 100
    batches = [torch.randn(64, 4)]
    model = calibrated(net, weight="int4 symmetric tensor", batches=batches)
    first, second = net[0].weight.abs().amax(1), net[2].weight.abs().amax(0)
    done = bw.equalize(model, batches, rounds=1)
    assert list(done.changed) == ["0 to 2"]
    level = (first * second).sqrt()  # the range that channel i has on both sides
    assert torch.allclose(model[0].weight.abs().amax(1), level, rtol=1e-5)
    assert torch.allclose(model[2].weight.abs().amax(0), level, rtol=1e-5)
    assert torch.allclose(model[0].bias, net[0].bias * (second / first).sqrt(), rtol=1e-5)


def test_what_does_not_help_is_left_as_it_was(monkeypatch):
    model = calibrated(uneven(Chain()), weight=PER_TENSOR)
    state = copy.deepcopy(model.state_dict())
    errors = itertools.count()
    monkeypatch.setattr(Trials, "_apart", lambda _: float(next(errors)))  # each is worse than the one before
    done = bw.equalize(model, data())
    assert not done.changed
    assert done.skipped["one.0 to deep.0"] == "it would not lower the error"
    assert next(errors) == 4  # at first, for all pairs together, and once for each pair that differs widely
    for name, value in model.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[name])), name


def test_no_error_ever_grows():
    for seed in range(3):
        torch.manual_seed(seed)
        net = trained(Net())
        for bits, spec in ((4, "int4 symmetric tensor"), (3, "int3 symmetric narrow channel:0")):
            model = calibrated(net, bits, weight=spec)
            errors = [outputs_apart(model, Original(model), data())]
            for step in (bw.equalize, bw.smooth):
                step(model, data())
                errors.append(outputs_apart(model, Original(model), data()))
            assert errors == sorted(errors, reverse=True)
            assert float_gap(model, net) < 1e-4
            assert all(q.mode.name == "QUANTIZE" for q in quantizers(model).values())


def test_reasons_why_there_is_no_link():
    model, done = calibrated(trained(Net()), 8), Correction("equalize")
    names = [link.name for link in find_links(model, done, norms=(), products=False)]
    assert names == ["stem.0 to deep.0", "deep.0 to wide.0, side"]
    assert done.skipped == {
        "wide.0": "add reads its result",
        "side": "add reads its result",
        "fc": "output reads its result",
    }
    done = Correction("equalize")
    model = calibrated(trained(Chain(nn.Hardtanh)))  # it also limits from below
    assert [link.name for link in find_links(model, done, norms=(), products=False)] == ["two.0 to two.2"]
    assert "reads its result" in done.skipped["one.0"]


@pytest.fixture(scope="module")
def limited():
    """A net with ReLU6 whose channels differ: those that never reach 6 are scaled down."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), *(InvertedResidual(8, 8, 1) for _ in range(2)))
    batches = [torch.randn(32, 3, 8, 8) for _ in range(2)]
    for block in net[1:]:
        nn.init.uniform_(block.body[1].weight, 0.3, 4.0)
    for batch in batches * 3:
        net.train()(batch)
    return scale_below_limits(net.eval(), torch.cat(batches), seed=0), batches


def test_factors_move_past_a_limit_and_files_need_none(limited, tmp_path):
    net, batches = limited
    model = calibrated(net, weight="int4 symmetric channel:0", backend="onnxruntime", batches=batches)
    before = outputs_apart(model, Original(model), batches)
    done = bw.equalize(model, batches)
    assert outputs_apart(model, Original(model), batches) < 0.2 * before
    assert set(done.changed) == {f"{i}.body.{j} to {i}.body.{j + 3}" for i in (1, 2) for j in (0, 3)}
    limits = [m for m in model.modules() if isinstance(m, ChannelLimit)]
    assert len(limits) == 4
    assert all(m.high.unique().numel() > 1 for m in limits)
    unseen = 5 * torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), all_off(model):
        assert torch.allclose(model(unseen), net(unseen), rtol=1e-4, atol=1e-5)
    bw.export(model, tmp_path / "model.onnx")
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    assert {node.op_type for node in nodes} == {"Conv", "Add", "QuantizeLinear", "DequantizeLinear"}
    assert bw.verify(model, tmp_path / "model.onnx", batches, latency=False).ok
    bw.save(model, tmp_path / "saved")
    again = bw.load(tmp_path / "saved", net)
    with torch.no_grad():
        assert torch.equal(again(unseen), model(unseen))
    assert bw.equalize(model, batches, rounds=1).step == "equalize"  # and limits stay exact
    with torch.no_grad(), all_off(model):
        assert torch.allclose(model(unseen), net(unseen), rtol=1e-4, atol=1e-5)


def test_where_quantizers_do_not_cover_the_limits_the_relu6_stays(limited, monkeypatch):
    net, batches = limited
    model = calibrated(net, weight="int4 symmetric channel:0", batches=batches)
    state = list(model.state_dict())
    monkeypatch.setattr("bitwright.correction.limits.saturates", lambda *_: False)
    assert not bw.equalize(model, batches).changed
    assert list(model.state_dict()) == state
    assert not any(isinstance(m, ChannelLimit) for m in model.modules())


def test_the_next_corrector_aims_at_the_equalized_float_model():
    net = uneven(Chain())
    model = calibrated(net, weight=PER_TENSOR)
    bw.equalize(model, data())
    equalized = copy.deepcopy(model)
    done = bw.correct_bias(model, data())
    # A fresh model with these parameters has no memory of any other original.
    equalized.__dict__.pop("bitwright_original")
    wanted = bw.correct_bias(equalized, data())
    assert done.changed == pytest.approx(wanted.changed, rel=1e-3)
    analytic = bw.correct_bias_analytically(model)
    assert max(analytic.changed.values()) < 1.0


class Block(nn.Module):
    """A transformer block, with its attention as one module."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.n1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    net = Block().eval()
    with torch.no_grad():
        for norm, weight in ((net.n1, net.attention.in_proj_weight), (net.n2, net.up.weight)):
            norm.weight[3], norm.bias[3], norm.weight[9] = 60.0, 20.0, 40.0  # outlier channels, as large models have
            weight[:, [3, 9]] /= 60.0
            weight *= 3
    return net, [torch.randn(16, 12, 32) for _ in range(2)]


def test_smoothing_takes_outliers_out_of_activations(block, tmp_path):
    net, batches = block
    model = bw.calibrate(bw.prepare(copy.deepcopy(net), batches[0], recipe="W8A8"), batches)
    before = outputs_apart(model, Original(model), batches)
    done = bw.smooth(model, batches)
    assert set(done.changed) == {"n1 to attention.in_proj_weight", "n2 to up"}
    assert outputs_apart(model, Original(model), batches) < 0.3 * before
    assert float_gap(model, net) < 1e-5
    path = tmp_path / "block.onnx"
    bw.export(model, path)
    proof = bw.verify(model, path, batches[:1], runtimes=["onnxruntime"], latency=False)
    assert proof.ok, str(proof)


def test_the_factor_is_that_of_the_paper(block):
    net, batches = block
    model = bw.calibrate(bw.prepare(copy.deepcopy(net), batches[0], recipe="W8A8"), batches)
    seen = []
    hook = net.up.register_forward_pre_hook(lambda _m, args: seen.append(args[0].abs().amax((0, 1))))
    with torch.no_grad():
        for x in batches:
            net(x)
    hook.remove()
    x, w = torch.stack(seen).amax(0), net.up.weight.detach().abs().amax(0)
    bw.smooth(model, batches, alpha=0.7)
    factor = x**0.7 / w**0.3
    assert torch.allclose(model.up.weight, net.up.weight * factor, rtol=1e-4)
    assert torch.allclose(model.n2.weight, net.n2.weight / factor, rtol=1e-4)
    assert torch.allclose(model.n2.bias, net.n2.bias / factor, rtol=1e-4)


def test_several_alphas_are_no_worse_than_one(block):
    net, batches = block
    errors = []
    for alpha in (0.5, [0.3, 0.5, 0.8]):
        model = bw.calibrate(bw.prepare(copy.deepcopy(net), batches[0], recipe="W4A8"), batches)
        bw.smooth(model, batches, alpha=alpha)
        errors.append(outputs_apart(model, Original(model), batches))
    assert errors[1] <= errors[0] * 1.05  # the best at each place, not of all together


def test_by_recipe(block):
    net, batches = block
    recipe = {"preset": "W8A8", "correct": ["smooth", "equalize", "bias"]}
    model = bw.calibrate(bw.prepare(copy.deepcopy(net), batches[0], recipe=recipe), batches)
    assert [each.step for each in bw.correct(model, batches)] == ["smooth", "equalize", "correct_bias"]


def test_a_weight_that_others_read_takes_no_factor():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one = nn.LayerNorm(8), nn.Linear(8, 8)
            self.two = nn.Linear(8, 8)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.relu(self.one(self.norm(x))))

    model, done = calibrated(Tied().eval(), 8, batches=[torch.randn(4, 8)]), Correction("smooth")
    assert find_links(model, done) == []
    assert done.skipped["norm"] == "parameters are shared"
    assert done.skipped["one"] == "parameters are shared"


@pytest.mark.parametrize("alpha", [1.5, -0.1, [], [0.5, "a"]])
def test_settings_are_checked(alpha, block):
    net, batches = block
    model = bw.prepare(copy.deepcopy(net), batches[0], recipe="W8A8")
    with pytest.raises(ConfigError, match="alpha must be a number from 0 to 1"):
        bw.smooth(model, batches, alpha=alpha)
    with pytest.raises(CalibrationError, match="calibrate it first"):
        bw.smooth(model, batches)
    with pytest.raises(ConfigError, match="rounds and samples must be 1 or more, not 0 and 128"):
        bw.equalize(model, batches, rounds=0)


def test_functions_with_a_weight_as_argument_are_skipped_by_the_other_correctors(block):
    net, batches = block
    model = bw.calibrate(bw.prepare(copy.deepcopy(net), batches[0], recipe="W8A8"), batches)
    for done in bw.correct(model, batches, ["weight_ranges", "gptq", "norms", "analytic_bias", "bias"]):
        assert sum("whose weight is an argument" in reason for reason in done.skipped.values()) == 2
