"""A BatchNorm that stands alone becomes a depthwise convolution, for onnxruntime."""

import pytest
import torch
from torch import nn

import bitwright as bw


class Branches(nn.Module):
    """A norm in parallel to a convolution, as in nets that are reparametrized for deployment."""

    def __init__(self, before=torch.relu):
        super().__init__()
        self.first, self.conv, self.alone = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.before = before
        self.alone.running_mean.normal_()
        self.alone.running_var.uniform_(0.5, 2)
        nn.init.uniform_(self.alone.weight, -1, 2)
        nn.init.normal_(self.alone.bias)

    def forward(self, x):
        x = self.before(self.first(x))
        return torch.relu(self.conv(x) + self.alone(x))


class Reused(Branches):
    """A norm that is called twice."""

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.alone(x) + self.alone(torch.relu(self.conv(x)))


def rectified(*after):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *after)


def setup(net=None, backend="onnxruntime"):
    torch.manual_seed(0)
    net, x = (net or Branches()).eval(), torch.randn(4, 3, 10, 8)
    return net, bw.prepare(net, x, backend), x


def verdicts(model):
    return {e.name: e.verdict.value for e in bw.ledger_of(model).entries}


def test_it_is_folded_and_proven(tmp_path):
    net, model, x = setup()
    assert torch.equal(model(x), net(x))
    assert verdicts(model)["alone"] == "fused"
    assert "norm_to_convolution: alone is folded into a convolution of its own" in bw.ledger_of(model).notes
    bw.calibrate(model, [x], progress=False)
    proof = bw.verify(model, bw.export(model, tmp_path / "net.onnx"), [x], latency=False, progress=False)
    assert proof.ok, proof.missed
    assert proof.runtimes["onnxruntime"].coverage == 1.0


def test_its_weights_are_the_factors_without_error():
    net, model, x = setup()
    bw.calibrate(model, [x], progress=False)
    norm = net.alone
    factors = norm.weight / (norm.running_var + norm.eps).sqrt()
    stored = next(w for w in bw.nn.weight_sites.weight_sites(model) if "alone" in w.key or "alone" in w.name)
    rounded = stored.quantizer(stored.weight())
    torch.testing.assert_close(rounded.flatten(), factors, rtol=1e-5, atol=0)


def test_its_convolution_runs_only_once_its_weights_are_quantized(monkeypatch):
    _, model, x = setup()
    groups, conv2d = [], nn.functional.conv2d

    def counted(*args):
        groups.append(args[6])
        return conv2d(*args)

    monkeypatch.setitem(bw.nn.conv._CONV, 2, counted)
    model(x)
    assert groups == [1, 1]
    bw.calibrate(model, [x], progress=False)
    assert groups == [1, 1] * 2
    model(x)
    assert sorted(groups[4:]) == [1, 1, 8]


def test_names_and_parameters_stay():
    net, model, _ = setup()
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in net.named_parameters()}
    assert {k for k in model.state_dict() if not k.startswith("bitwright") and "quantizer" not in k} == {
        *net.state_dict()
    }


def test_the_statistics_go_on_moving_in_training():
    net, model, x = setup()
    bw.calibrate(model, [x], progress=False)
    bw.unfreeze_batchnorm(model)
    model.train()
    model(x).sum().backward()
    inside = torch.relu(net.first(x)).mean((0, 2, 3))
    wanted = 0.9 * net.alone.running_mean + 0.1 * inside
    torch.testing.assert_close(model.alone.running_mean, wanted, rtol=0, atol=0.05)
    assert model.alone.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("net", "backend"),
    [
        (lambda: Branches(nn.functional.gelu), "onnxruntime"),
        (Branches, "openvino"),
        (Reused, "onnxruntime"),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), "onnxruntime"),
        (lambda: rectified(nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)), "onnxruntime"),
        (lambda: rectified(nn.BatchNorm2d(8, track_running_stats=False)), "onnxruntime"),
    ],
    ids=["after a float operator", "openvino", "called twice", "after a layer", "before a layer", "without statistics"],
)
def test_others_stay(net, backend):
    _, model, _ = setup(net(), backend)
    assert not [note for note in bw.ledger_of(model).notes if note.startswith("norm_to_convolution")]


def test_gelu_of_a_quantized_tensor_is_one_operator(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 4, 1))
    _, model, x = setup(net)
    bw.calibrate(model, [x], progress=False)
    proof = bw.verify(model, bw.export(model, tmp_path / "net.onnx"), [x], latency=False, progress=False)
    assert proof.ok, proof.missed
    assert [o.runs_as for o in proof.runtimes["onnxruntime"].operators if not o.integer] == ["Max", "Gelu"]
