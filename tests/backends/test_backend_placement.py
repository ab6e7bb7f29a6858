"""Backends as data: exact specs, where quantizers sit on the probe net, and that the specs hold through training."""

import pytest
import torch

import bitwright as bw
from bitwright.backends import BACKENDS
from bitwright.preparation import Verdict
from bitwright.quantizer import quantizers
from tests.backends.probe import LAYERS, SHIPPED, images, old_names, prepared, probe

FIXED, LSQ, TQT, NNIE = "FixedFakeQuantize", "LearnableFakeQuantize", "TqtFakeQuantize", "NNIEFakeQuantize"
_POT = "int8 symmetric pot tensor"
MINMAX, EMA = "MinMaxObserver", "EMAMinMaxObserver"

# What tables of the old toolkit say, or for the CPU runtimes what was measured with them: weights, their observer and
# method, activations, their observer and method.
TABLE = {
    "academic": (None, MINMAX, LSQ, None, EMA, LSQ),
    "academic_nlp": (None, MINMAX, LSQ, None, EMA, LSQ),
    "nnie": ("int8 symmetric tensor", MINMAX, NNIE, "int8 symmetric tensor", EMA, NNIE),
    "onnx_qnn": ("uint8 affine tensor", MINMAX, LSQ, "uint8 affine tensor", MINMAX, LSQ),
    "onnxruntime": ("int7 symmetric narrow channel:0", MINMAX, FIXED, "uint8 affine tensor", MINMAX, FIXED),
    "openvino": ("int7 symmetric narrow channel:0", MINMAX, FIXED, "uint8 affine tensor", MINMAX, FIXED),
    "pplcuda": ("uint8 affine channel:0", MINMAX, LSQ, "uint8 affine tensor", MINMAX, LSQ),
    "pplw8a16": ("uint8 affine tensor", MINMAX, LSQ, "uint16 affine tensor", EMA, LSQ),
    "qdq": ("int8 symmetric narrow channel:0", MINMAX, LSQ, "int8 symmetric narrow tensor", EMA, LSQ),
    "snpe": ("uint8 affine tensor", MINMAX, LSQ, "uint8 affine tensor", EMA, LSQ),
    "stpu": ("int8 symmetric narrow tensor", MINMAX, FIXED, "int8 symmetric narrow tensor", EMA, FIXED),
    "tengine_u8": ("uint8 affine tensor", MINMAX, LSQ, "uint8 affine tensor", EMA, LSQ),
    "tensorrt": ("int8 symmetric narrow channel:0", MINMAX, LSQ, "int8 symmetric narrow tensor", EMA, LSQ),
    "tensorrt_nlp": ("int8 symmetric narrow channel:0", MINMAX, LSQ, "int8 symmetric narrow tensor", EMA, LSQ),
    "virtual": ("int8 symmetric channel:0", MINMAX, FIXED, "uint8 affine tensor", MINMAX, FIXED),
    "vitis": (_POT, "MinMaxFloorObserver", TQT, _POT, "PoTModeObserver", TQT),
}

# Tensors with a quantizer, by the names the old toolkit gave them on this net ("stem" is the stem's convolution with
# its BatchNorm and ReLU). It also had "pool" after "stem" and "up" after "layer1_r2": a max-pool and a nearest
# upsampling give values that are quantized already, so these two need none here, and what reads them reads the
# quantized "stem" and "layer1_r2". Where only "pool" or "up" was quantized, "stem" or "layer1_r2" is.
IMAGE = {
    *("x", "stem", "layer1_c1", "layer1_c2", "layer1_r2", "cat", "conv3", "mul", "deconv", "add_1", "sigmoid", "mul_1"),
    "flatten",
}
PLACED = {
    # Its deconvolution had a quantized weight and a float input: the input, "mul", is quantized now.
    "academic": {"x", "stem", "layer1_r1", "cat", "mul", "flatten"},
    "academic_nlp": {"flatten"},
    "tensorrt": IMAGE - {"layer1_c2"},  # TensorRT computes a sum along with the convolution before it
    "qdq": IMAGE,
    "nnie": IMAGE,
    "snpe": IMAGE | {"fc"},
    "pplw8a16": IMAGE | {"fc"},
    "pplcuda": IMAGE | {"fc"},
    "stpu": IMAGE | {"fc"},
    "tengine_u8": IMAGE | {"add", "fc"},
    "vitis": (IMAGE | {"add", "fc"}) - {"x", "sigmoid"},
    "onnx_qnn": IMAGE - {"mul", "sigmoid"},
    "tensorrt_nlp": {"stem", "layer1_r2", "deconv", "flatten"},
    # It took "cat" for transparent, so that conv3 had a quantized weight and a float input. Here "cat" is quantized,
    # its inputs with one scale, and the deconvolution's input, "mul", too.
    # The factor of `conv3(x) * 2` is part of the layer where the target folds it.
    "openvino": {"x", "stem", "layer1_c1", "layer1_c2", "layer1_r2", "cat", "conv3", "deconv", "mul_1", "flatten"},
    # Not in the old toolkit: all that onnxruntime has kernels for, and for simulation all arithmetic on two tensors.
    "onnxruntime": IMAGE - {"mul"},
    "virtual": IMAGE - {"conv3"},
}
# The old toolkit quantized the weights of every layer, whether its input was quantized or not, but for onnx_qnn's
# linear layer and deconvolution. Here both are, or neither.
WEIGHTS = dict.fromkeys(SHIPPED, LAYERS) | {
    "academic_nlp": {"fc"},
    "tensorrt_nlp": {"fc"},
    "onnx_qnn": LAYERS - {"deconv", "fc"},
}


def test_all_backends_are_there():
    assert set(SHIPPED) <= set(BACKENDS)


@pytest.mark.parametrize("name", SHIPPED)
def test_specs_observers_and_methods(name):
    backend = BACKENDS.get(name)
    rules = (backend.weights, backend.activations)
    specs = [None if r.spec is None else str(r.spec) for r in rules]
    found = [(spec, r.observer, r.method) for spec, r in zip(specs, rules, strict=True)]
    assert (*found[0], *found[1]) == TABLE[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_quantizers_sit_exactly_where_the_table_says(name):
    model = prepared(name)
    assert old_names(model, fused=name != "academic") == PLACED[name]
    weights = {n.removesuffix("._weight_quantizer") for n in quantizers(model) if n.endswith("._weight_quantizer")}
    assert weights == WEIGHTS[name]
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert {n for n in LAYERS if entries[n].verdict is Verdict.INTEGER} == WEIGHTS[name]
    assert {n for n in LAYERS if entries[n].weight} == WEIGHTS[name]
    assert {n: v.verdict for n, v in entries.items() if n in ("pool", "up", "flatten")} == dict.fromkeys(
        ("pool", "up", "flatten"), Verdict.CARRIED
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_every_quantizer_has_the_backends_spec(name):
    model, backend = prepared(name), BACKENDS.get(name)
    for path, quantizer in quantizers(model).items():
        weight = path.endswith("._weight_quantizer")
        spec = (backend.weights if weight else backend.activations).spec or quantizer.spec
        if weight and path.startswith("deconv"):
            assert quantizer.spec.format == spec.format
            assert str(quantizer.spec.granularity) in ("tensor", "channel:1")
            continue
        assert quantizer.spec == spec, path
        expected = TABLE[name][1:3] if weight else TABLE[name][4:6]
        if name == "stpu" and path.endswith(".sigmoid"):
            expected = ("FixedRangeObserver", expected[1])
        assert (quantizer.observer_name, quantizer.method_name) == expected, path


@pytest.mark.parametrize("name", SHIPPED)
def test_specs_hold_from_calibration_to_evaluation(name):
    """Range, zero point, power of two and grid, before training, while training and after."""
    model = prepared(name)
    net, x = probe(), images(4)
    with torch.no_grad():
        assert torch.equal(model(x), net(x))  # off: exact
    seen = {}
    for path, quantizer in quantizers(model).items():
        quantizer.register_forward_hook(
            lambda q, _, out, path=path: seen.setdefault(path, []).append((q, out.detach()))
        )
    bw.calibrate(model, [images(4, seed=s) for s in (2, 3)], progress=False)
    seen.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        check_grids(seen)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.fc.parameters())
    model.eval()
    with torch.no_grad():
        first, second = model(x), model(x)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    check_grids(seen)
    used = {p for p in quantizers(model) if not p.endswith("._weight_quantizer")}
    assert used | {f"{w}._weight_quantizer" for w in WEIGHTS[name]} == set(quantizers(model))


def check_grids(seen):
    assert seen
    for path, calls in seen.items():
        for quantizer, out in calls:
            spec = quantizer.spec
            if quantizer.method_name == NNIE:
                magnitude = out[out != 0].abs().double()
                powers = 16 * torch.log2(magnitude)
                assert (powers - powers.round()).abs().max() < 1e-3, path  # a logarithmic grid, 16 steps an octave
                assert powers.round().max() - powers.round().min() <= 127, path
                continue
            # The optimizer may have moved the scale since; take the grid from the values where it learns.
            assert len(out.unique()) <= (spec.qmax - spec.qmin + 1) * quantizer.scale.numel(), path
            scale, zero_point = (p.detach().double() for p in quantizer.qparams())
            assert (scale > 0).all(), path
            if spec.symmetric:
                assert (zero_point == 0).all(), path
            assert ((zero_point >= spec.qmin) & (zero_point <= spec.qmax)).all(), path
            if spec.power_of_two:
                assert torch.equal(torch.log2(scale), torch.log2(scale).round()), path
    # Once more with the scales in force: every value lies on the grid, inside the range.
    for path, calls in seen.items():
        quantizer, out = calls[-1]
        if quantizer.method_name == NNIE:
            continue
        again = quantizer(out.clone()).detach()
        scale, zero_point = (p.detach().double() for p in quantizer.qparams())
        shape = [-1 if d == quantizer.method.axis else 1 for d in range(out.ndim)] if scale.ndim else []
        steps = again.double() / scale.reshape(shape) + zero_point.reshape(shape)
        assert (steps - steps.round()).abs().max() < 0.01, path
        assert steps.round().min() >= quantizer.spec.qmin, path
        assert steps.round().max() <= quantizer.spec.qmax, path
    seen.clear()
