"""Layers called several times: one weight, and an input quantizer and a bias of its own for each call."""

import copy

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.nn.bias import round_bias


class Growing(nn.Module):
    """One block on residual tensors from ±0.7 to ±2,000."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(16, 16)

    def forward(self, x):
        inputs = [x * 0.7 * (2000 / 0.7) ** (k / 9) for k in range(10)]
        return tuple(y + self.block(y) for y in inputs)


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


def _sqnr(noisy: torch.Tensor, clean: torch.Tensor) -> float:
    noise = (noisy - clean).detach()
    return float(10 * torch.log10(clean.detach().square().mean() / noise.square().mean()))


@pytest.fixture
def x():
    return torch.randn(4, 5, 16).clamp(-1, 1)


def test_residuals_of_all_sizes_keep_their_accuracy(x):
    net = Growing().eval()
    model = bw.calibrate(bw.prepare(net, x), [x])
    ratios = [_sqnr(got, want) for got, want in zip(model(x), net(x), strict=True)]
    assert min(ratios) > 35
    steps = [float(q.qparams()[0]) for q in model.block.calls]
    assert len(steps) == 10
    assert max(steps) > 1000 * min(steps)


def test_the_bias_of_each_call_has_steps_of_its_own_input(x):
    model = bw.calibrate(bw.prepare(Twice(nn.Linear(16, 16)).eval(), x), [x * 3])
    layer, weight_scale = model.layer, model.layer.weight_quantizer.qparams()[0]
    for call, source in enumerate(layer.calls):
        step = source.qparams()[0] * weight_scale
        assert torch.equal(layer.bias_scale(call), step.detach())
        _, bias = layer.deploy(*layer.folded_weight(), call)
        assert torch.equal(bias, (round_bias(layer.bias, step) * step))
    assert not torch.equal(layer.bias_scale(0), layer.bias_scale(1))


def test_float_parity_copies_and_checkpoints(x):
    net = Growing().eval()
    model = bw.prepare(net, x)
    for got, want in zip(model(x), net(x), strict=True):
        assert torch.equal(got, want)
    assert set(net.state_dict()) <= set(model.state_dict())
    assert sum(name.startswith("block.") and "quantizer" not in name for name in model.state_dict()) == 2
    bw.calibrate(model, [x])
    fresh = bw.prepare(net, x)
    fresh.load_state_dict(model.state_dict())
    for other in (fresh, copy.deepcopy(model)):
        for got, want in zip(other(x), model(x), strict=True):
            assert torch.equal(got, want)


def test_hooks_see_every_call(x):
    net, seen = Twice(nn.Linear(16, 16)).eval(), []
    net.layer.register_forward_hook(lambda module, given, result: seen.append(result.shape))
    model = bw.calibrate(bw.prepare(net, x), [x])
    seen.clear()
    model(x)
    assert seen == [x.shape, x.shape]


def test_a_call_whose_input_stays_float_rounds_no_bias(x):
    net = Twice(nn.Linear(16, 16)).eval()
    rules = [{"match": "node:layer_1", "input": "float"}]
    model = bw.calibrate(bw.prepare(net, x, recipe={"rules": rules}), [x])
    assert model.layer.bias_scale(0) is not None
    assert model.layer.bias_scale(1) is None


def test_trained_calls_move_one_weight(x):
    model = bw.calibrate(bw.prepare(Twice(nn.Linear(16, 16)).eval(), x), [x])
    model.train()
    model(x).square().sum().backward()
    assert float(model.layer.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(8, 8), (4, 5, 8)), (nn.Linear(8, 8), (4, 8)), (nn.Conv2d(8, 8, 3, padding=1), (2, 8, 6, 6))],
)
def test_every_call_runs_in_integers(tmp_path, layer, shape):
    x = torch.randn(shape)
    model = bw.calibrate(bw.prepare(Twice(layer).eval(), x), [x])
    proof = bw.verify(model, bw.export(model, tmp_path / "m.onnx"), [x], latency=False)
    assert proof.ok
    for run in proof.runtimes.values():
        kind = "linear" if isinstance(layer, nn.Linear) else "conv2d"
        assert not [o for o in run.floats if o.kind == kind]
