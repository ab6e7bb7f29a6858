"""PD-Quant's loss on predictions and Genie's learned weight scales, as options of reconstruct."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.methods.adaround import AdaRoundFakeQuantize, fraction
from bitwright.methods.qdrop import QDropFakeQuantize
from bitwright.quantizer import quantizers
from bitwright.reconstruction.losses import prediction_gap
from bitwright.spec import QuantSpec
from tests.reconstruction.nets import Residual, calibrated, residual_net


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_the_gap_with_a_temperature():
    logits, target = numbers(4, 5).requires_grad_(), numbers(4, 5)
    p, q = (target / 4).softmax(1), (logits / 4).softmax(1)
    assert float(prediction_gap([logits], [target], 4.0)) == pytest.approx(float((p * (p / q).log()).sum() / 4))
    assert torch.autograd.gradcheck(lambda a: prediction_gap([a], [target], 4.0), logits)


@pytest.mark.parametrize("spec", ["int4 symmetric narrow channel:0", "uint3 affine tensor"])
def test_gradients_of_learned_weight_scales(spec):
    torch.manual_seed(0)
    weight, method = torch.randn(6, 5), AdaRoundFakeQuantize(QuantSpec.parse(spec))
    lo, hi = (weight.amin(), weight.amax()) if "tensor" in spec else (weight.amin(1), weight.amax(1))
    scale = (hi - lo) / 9 if "tensor" in spec else weight.abs().amax(1) / 7
    zero = torch.full_like(scale, 3 if "tensor" in spec else 0)
    method.init(weight, scale, zero)
    method.learn("stretch", torch.rand_like(scale) * 0.2 + 0.9)
    method.stretching = True
    ask = torch.randn(6, 5)
    loss = (method(weight, scale, zero) * ask).sum()
    grads = torch.autograd.grad(loss, [method.stretch, method.rounding])
    s, t = (v.reshape(-1, 1) if v.ndim else v for v in (scale, method.stretch.detach()))
    floor = (weight / s).floor()
    z = 3 if "tensor" in spec else 0
    low, high = method.spec.qmin, method.spec.qmax

    def written_out(stretch, rounding):
        q = (floor.double() + fraction(rounding) + z).clamp(low, high) - z
        return (q * s.double() * stretch * ask.double()).sum()

    values = [t.double(), method.rounding.detach().double()]
    assert float(loss) == pytest.approx(float(written_out(*values)), rel=1e-4)
    for number, grad in enumerate(grads):
        for place in range(grad.numel()):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [v.clone() for v in values]
                moved[number].view(-1)[place] += step
                ends.append(float(written_out(*moved)))
            assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float(grad.view(-1)[place]), rel=1e-3, abs=1e-4)


def test_integers_stay_when_a_learned_scale_is_stored():
    torch.manual_seed(0)
    weight = torch.randn(8, 20)
    quantizer = bw.TensorQuantizer("int4 symmetric narrow channel:0", method="AdaRoundFakeQuantize")
    scale = weight.abs().amax(1) / 7
    quantizer.set_qparams(scale)
    quantizer.method.init(weight, *quantizer.qparams())
    before = quantizer.integers(weight)
    stretch = torch.linspace(0.6, 1.8, 8)
    quantizer.method.learn("stretch", stretch)
    quantizer.set_qparams(scale * stretch)
    quantizer.method.harden()
    assert torch.equal(quantizer.integers(weight), before)
    wanted = before.float() * (scale * stretch)[:, None]
    assert torch.allclose(quantizer.fake_quantize(weight), wanted, rtol=1e-6)


@pytest.mark.parametrize("options", [{"prediction": 1.0, "temperature": 4.0}, {"weight_scale_lr": 3e-3}])
@pytest.mark.parametrize("name", ["residual", "kinds"])
def test_errors_go_down_or_stay(name, options):
    model, batches = calibrated(name)
    state = copy.deepcopy(bw.float_state_dict(model))
    result = bw.reconstruct(model, batches, "qdrop", steps=30, **options)
    assert all(unit.after <= unit.before for unit in result.units)
    assert name != "residual" or any(unit.kept for unit in result.units)
    for key, value in bw.float_state_dict(model).items():
        assert torch.equal(value, state[key]), key


@pytest.fixture(scope="module")
def digits():
    """A residual net trained briefly on real digits, images to reconstruct with, and others for comparison."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels)
    torch.manual_seed(0)
    stem, head = nn.Conv2d(1, 12, 3, padding=1), nn.Linear(12, 10)
    net = nn.Sequential(stem, nn.ReLU(), Residual(12), Residual(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(5):
        for chosen in torch.randperm(1200).split(60):
            optimizer.zero_grad()
            F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return net.eval(), images[:256].split(64), images[1200:]


def test_predictions_come_nearer_if_they_count(digits):
    """What the float model makes of units that are done, up to each of them, on images that none of them has seen."""
    net, batches, others = digits
    recipe = {"backend": "virtual", "weight": "int2 channel:0", "activation": "float"}
    gaps = []
    for prediction in (0.0, 10.0):
        model = bw.calibrate(bw.prepare(net, batches[0], recipe=recipe), batches)
        bw.reconstruct(model, batches, "adaround", "block", steps=120, prediction=prediction)
        gaps.append(0.0)
        for last in (0, 2, 3):  # the stem, and each block
            for name, quantizer in quantizers(model).items():
                quantizer.enabled = int(name[0]) <= last
            with torch.no_grad():
                gaps[-1] += float(prediction_gap([model(others)], [net(others)]))
    assert gaps[1] < 0.7 * gaps[0]


def test_predictions_are_made_of_quantized_activations(digits, monkeypatch):
    """QDrop drops activations when it measures the unit's error, but not for predictions."""
    net, batches, _ = digits
    model = bw.calibrate(bw.prepare(net, batches[0], recipe="W2A4"), batches)
    quantize, kept = QDropFakeQuantize.quantize, []
    monkeypatch.setattr(QDropFakeQuantize, "quantize", lambda m, *args: kept.append(m.prob) or quantize(m, *args))
    bw.reconstruct(model, batches, "qdrop", steps=2, prediction=1.0)
    assert 0 < kept.count(0.5) <= kept.count(1.0)


def test_learned_weight_scales_are_saved_and_resumed(tmp_path):
    options = {"steps": 40, "weight_scale_lr": 1e-2, "checkpoint": tmp_path / "units"}
    model, batches = calibrated("residual")
    bw.reconstruct(model, batches, "adaround", **options)
    stretched = [q for q in quantizers(model).values() if getattr(q.method, "stretch", None) is not None]
    assert stretched
    assert any(bool((q.method.stretch != 1).any()) for q in stretched)
    again, _ = calibrated("residual")
    bw.reconstruct(again, batches, "adaround", **options)  # every unit comes from its checkpoint
    with torch.no_grad():
        assert torch.equal(again(*batches[0]), model(*batches[0]))
    bw.save(model, tmp_path / "saved")
    loaded = bw.load(tmp_path / "saved", residual_net().eval())
    with torch.no_grad():
        assert torch.equal(loaded(*batches[0]), model(*batches[0]))


def test_a_learned_weight_scale_is_deployed_as_simulated(tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(16, 3, 8, 8) for _ in range(2)]
    model = bw.calibrate(bw.prepare(residual_net().eval(), batches[0], recipe="W4A8"), batches)
    bw.reconstruct(model, batches, "qdrop", steps=40, weight_scale_lr=1e-2)
    path = tmp_path / "model.onnx"
    bw.export(model, path)
    proof = bw.verify(model, path, batches[:1], runtimes=["onnxruntime"], latency=False)
    assert proof.ok, str(proof)
