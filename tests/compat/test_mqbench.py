"""MQBench's prepare_by_platform: the seed's config, an effect of every key, the switches, and what is refused."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bitwright as bw
import bitwright.compat.mqbench.nn as qnn
from bitwright.compat.mqbench import (
    BackendType,
    ConvBNReLUFusion,
    disable_all,
    enable_all,
    enable_calibration,
    enable_calibration_quantization,
    enable_calibration_woquantization,
    enable_quantization,
    fuse_linear_bn,
    prepare_by_platform,
    to_recipe,
)
from bitwright.errors import CalibrationError, ConfigError, UnknownNameError
from bitwright.nn.conv import QuantConv2d
from bitwright.preparation import ledger_of
from bitwright.quantizer import Mode, quantizers
from bitwright.recipe import Recipe

SEED = {
    "extra_qconfig_dict": {
        "w_observer": "MSEObserver",
        "a_observer": "MSEObserver",
        "w_fakequantize": "FixedFakeQuantize",
        "a_fakequantize": "FixedFakeQuantize",
        "w_qscheme": {"bit": 8, "symmetry": False, "per_channel": True, "pot_scale": False},
        "a_qscheme": {"bit": 8, "symmetry": False, "per_channel": True, "pot_scale": False},
    },
    "extra_quantizer_dict": {
        "additional_function_type": [operator.add],
        "additional_module_type": (torch.nn.Upsample),
        "additional_node_name": ["layer1_1_conv1"],
        "exclude_module_name": ["layer2.1.relu"],
        "exclude_function_type": [operator.mul],
        "exclude_node_name": ["layer1_1_conv1"],
    },
    "preserve_attr": {"": ["func1"], "backbone": ["func2"]},
    "extra_fuse_dict": {
        "additional_fuser_method_mapping": {(torch.nn.Linear, torch.nn.BatchNorm1d): fuse_linear_bn},
        "additional_fusion_pattern": {(torch.nn.BatchNorm1d, torch.nn.Linear): ConvBNReLUFusion},
        "additional_qat_module_mapping": {nn.ConvTranspose2d: qnn.qat.ConvTranspose2d},
    },
    "concrect_args": {},
}
ACADEMIC = {
    "extra_qconfig_dict": {
        "w_qscheme": {"bit": 4, "symmetry": True, "per_channel": True},
        "a_qscheme": {"bit": 4, "symmetry": False},
    }
}


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.relu(self.conv2(self.relu(self.bn1(self.conv1(x)))) + x)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        return self.func2(self.stem(x))

    def func2(self, x):
        return F.relu(x)


class Net(nn.Module):
    """Named as the seed's ResNet, with an upsampling, a gate, a transposed convolution, and a normed linear layer."""

    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.layer1 = nn.Sequential(Block(8), Block(8))
        self.layer2 = nn.Sequential(Block(8), Block(8))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.deconv = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.fc = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        y = self.layer2(self.layer1(self.backbone(x)))
        y = self.deconv(self.up(y)) * 0.5
        y = y * torch.sigmoid(y)
        return self.norm(self.fc(y.mean((2, 3))))

    def func1(self):
        return "kept"


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = Net().eval()
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return made


@pytest.fixture
def x():
    return torch.randn(4, 3, 8, 8)


def prepared(model, x, backend="Academic", **config):
    return prepare_by_platform(model, backend, {**ACADEMIC, **config}, example_inputs=x)


def specs(model):
    return {name: str(q.spec) for name, q in quantizers(model).items()}


def verdicts(model):
    return {e.name: e.verdict.value for e in ledger_of(model).entries}


def calibrated(model, *batches):
    enable_calibration(model)
    for batch in batches:
        model(batch)
    enable_quantization(model)
    return model


def snapshot(model):
    tree = {n: (m, m.training, list(m._forward_hooks)) for n, m in model.named_modules(remove_duplicate=False)}
    return tree, {n: (id(v), v.clone()) for n, v in model.state_dict(keep_vars=True).items()}


def same(before, after):
    return before[0] == after[0] and all(
        before[1][n][0] == i and torch.equal(before[1][n][1], v) for n, (i, v) in after[1].items()
    )


@pytest.mark.parametrize("lazy", [True, False])
def test_the_seeds_config_as_printed(model, x, lazy):
    before = snapshot(model)
    if lazy:
        made = prepare_by_platform(model, BackendType.Academic, SEED)
        assert isinstance(made, Net)
        assert made.func1() == "kept"
        made(x)
    else:
        made = prepare_by_platform(model, BackendType.Academic, SEED, example_inputs=x)
    assert torch.allclose(made(x), model(x), atol=1e-5)  # the linear layer has its norm folded in
    calibrated(made, x, x * 1.2)
    out = made(x)
    assert not torch.equal(out, model(x))
    assert (out - model(x)).abs().max() < 0.2 * model(x).abs().max()
    assert made.func1() == "kept"
    assert torch.equal(made.backbone.func2(x), F.relu(x))
    found = quantizers(made)
    assert {q.observer_name for q in found.values()} == {"MSEObserver"}
    assert {str(q.spec) for q in found.values()} == {"uint8 affine channel:0", "uint8 affine channel:1"}
    done = verdicts(made)
    assert done["layer1.1.conv1"] == "integer"  # added by name, which beats being excluded
    assert done["up"] == done["add"] == "integer"
    assert done["mul_1"] == done["layer2.1.relu"] == "float"
    assert isinstance(made.norm, nn.Identity)
    assert isinstance(made.deconv, qnn.qat.ConvTranspose2d)
    assert same(before, snapshot(model))
    made.train()(x).sum().backward()
    assert made.fc.weight.grad is not None


def test_scales_per_channel_where_a_tensor_has_no_channels(x):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.shift = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return self.conv(x) + (self.shift + 1.0)

    model = Shifted()
    made = calibrated(
        prepare_by_platform(
            model,
            "Academic",
            SEED | {"preserve_attr": {}, "extra_quantizer_dict": {"additional_function_type": [operator.add]}},
        ),
        x,
    )
    found = {n.rpartition(".")[2]: str(q.spec) for n, q in quantizers(made).items()}
    assert found["x"] == "uint8 affine channel:1"
    assert found["shift"] == "uint8 affine tensor"
    assert torch.allclose(made(x), model(x), atol=0.1)


def test_all_members_of_backend_type(model, x):
    assert list(BackendType.__members__) == [
        *("Academic", "Tensorrt", "SNPE", "PPLW8A16", "NNIE", "Vitis", "ONNX_QNN", "PPLCUDA", "OPENVINO"),
        *("Tengine_u8", "Tensorrt_NLP", "Academic_NLP", "QDQ", "STPU"),
    ]
    for backend in BackendType:
        config = ACADEMIC if "academic" in backend.value else None
        made = prepare_by_platform(model, backend, config, example_inputs=x)
        assert ledger_of(made).backend.name == backend.value
        assert torch.equal(made(x), model(x))
    assert BackendType.read("tensorrt") is BackendType.read("BackendType.Tensorrt") is BackendType.Tensorrt


def test_observers_quantizers_and_their_arguments(model, x):
    qconfig = {
        "w_observer": "ClipStdObserver",
        "a_observer": "EMAQuantileObserver",
        "w_fakequantize": "DSQFakeQuantize",
        "a_fakequantize": "PACTFakeQuantize",
        "w_qscheme": {"bit": 5, "symmetry": True, "symmetric_range": True, "std_scale": 2.0},
        "a_qscheme": {"bit": 6, "symmetry": True, "pot_scale": False, "threshold": 0.9},
        "a_observer_extra_args": {"ema_ratio": 0.5},
        "w_fakeq_params": {"alpha": 0.3},
        "a_fakeq_params": {"alpha": 4.0},
    }
    made = prepare_by_platform(model, "Academic", {"extra_qconfig_dict": qconfig}, example_inputs=x)
    weight = made.layer1[0].conv1.weight_quantizer
    assert str(weight.spec) == "int5 symmetric narrow tensor"
    assert (weight.observer_name, weight.observer.std_scale) == ("ClipStdObserver", 2.0)
    assert weight.method_name == "DSQFakeQuantize"
    activation = made.layer1[1].conv1.input_quantizer
    assert str(activation.spec) == "int6 symmetric tensor"
    assert (activation.observer.threshold, activation.observer.ema_ratio) == (0.9, 0.5)
    assert activation.method_name == "PACTFakeQuantize"
    calibrated(made, x)
    assert float(activation.method.alpha.detach()) == 4.0


OBSERVERS = [
    *("MinMaxObserver", "EMAMinMaxObserver", "MinMaxFloorObserver", "EMAMinMaxFloorObserver", "EMAQuantileObserver"),
    *("ClipStdObserver", "LSQObserver", "MSEObserver", "EMAMSEObserver"),
]
QUANTIZERS = [
    *("FixedFakeQuantize", "LearnableFakeQuantize", "NNIEFakeQuantize", "DoReFaFakeQuantize", "DSQFakeQuantize"),
    *("PACTFakeQuantize", "TqtFakeQuantize", "AdaRoundFakeQuantize"),
]


@pytest.mark.parametrize(
    ("observer", "quantizer"),
    [(o, "FixedFakeQuantize") for o in OBSERVERS] + [("MinMaxObserver", q) for q in QUANTIZERS],
)
def test_every_name_in_the_seeds_lists(model, x, observer, quantizer):
    scheme = {"bit": 8, "symmetry": True, "pot_scale": "Floor" in observer or "Tqt" in quantizer}
    qconfig = {
        **{f"{letter}_observer": observer for letter in "wa"},
        **{f"{letter}_fakequantize": quantizer for letter in "wa"},
        **{f"{letter}_qscheme": scheme for letter in "wa"},
    }
    made = calibrated(prepare_by_platform(model, "Academic", {"extra_qconfig_dict": qconfig}, example_inputs=x), x)
    assert {q.observer_name for q in quantizers(made).values()} == {observer}
    assert {q.method_name for q in quantizers(made).values()} == {quantizer}
    out = made(x)
    assert out.isfinite().all()
    assert not torch.equal(out, model(x))


def test_arguments_do_not_leak_into_the_next_model(model, x):
    changed = {"extra_qconfig_dict": {"a_observer_extra_args": {"ema_ratio": 0.5}}}
    first = prepare_by_platform(model, "Tensorrt", changed, example_inputs=x)
    second = prepare_by_platform(model, "Tensorrt", {}, example_inputs=x)
    ratios = [
        {q.observer.ema_ratio for n, q in quantizers(m).items() if "bitwright.quantizers" in n} for m in (first, second)
    ]
    assert ratios == [{0.5}, {0.9}]
    assert changed == {"extra_qconfig_dict": {"a_observer_extra_args": {"ema_ratio": 0.5}}}


@pytest.mark.parametrize(
    ("scheme", "spec"),
    [
        ({"bit": 8, "symmetry": True, "per_channel": True}, "int8 symmetric channel:{axis}"),
        ({"bit": 3, "symmetry": False}, "uint3 affine tensor"),
        ({"bit": 8, "symmetry": True, "symmetric_range": True, "pot_scale": True}, "int8 symmetric narrow pot tensor"),
        ({}, "int8 symmetric tensor"),
    ],
)
def test_schemes(model, x, scheme, spec):
    recipe, _ = to_recipe({"extra_qconfig_dict": {"w_qscheme": scheme, "a_qscheme": scheme}})
    assert str(recipe.weight.spec) == spec.format(axis=0)
    assert str(recipe.activation.spec) == spec.format(axis=1)


@given(st.integers(2, 16), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_schemes_have_mqbenchs_ranges(bit, symmetry, per_channel, pot_scale, symmetric_range):
    scheme = {"bit": bit, "symmetry": symmetry, "per_channel": per_channel, "pot_scale": pot_scale}
    scheme["symmetric_range"] = symmetric_range and symmetry
    recipe, notes = to_recipe({"extra_qconfig_dict": {"w_qscheme": scheme, "a_qscheme": scheme}})
    for spec in (recipe.weight.spec, recipe.activation.spec):
        low = -(2 ** (bit - 1)) + scheme["symmetric_range"] if symmetry else 0
        assert (spec.qmin, spec.qmax) == (low, low + 2**bit - 1 - scheme["symmetric_range"])
        assert (spec.symmetric, spec.power_of_two) == (symmetry, pot_scale)
    assert (recipe.weight.spec.param_shape((5, 6, 7)), recipe.activation.spec.param_shape((5, 6, 7))) == (
        ((5,), (6,)) if per_channel else ((), ())
    )
    assert Recipe.parse(recipe.to_yaml()) == recipe
    assert notes == []


def test_what_is_quantized_besides_and_what_is_not(model, x):
    plain = verdicts(prepared(model, x))
    assert plain["up"] == plain["add"] == plain["sigmoid"] == "float"
    assert plain["layer1.1.conv1"] == "integer"
    more = {
        "additional_function_type": [torch.sigmoid],
        "additional_module_type": nn.Upsample,
        "additional_node_name": ["add_1"],
        "exclude_module_name": ["layer1.1.conv1", "layer2.0"],
        "exclude_node_name": ["layer2_1_conv2"],
    }
    made = prepared(model, x, extra_quantizer_dict=more)
    done = verdicts(made)
    assert done["sigmoid"] == done["up"] == done["add_1"] == "integer"
    assert done["add"] == "float"
    assert done["layer1.1.conv1"] == done["layer2.0.conv1"] == done["layer2.0.conv2"] == "float"
    assert done["layer2.1.conv2"] == "float"
    assert done["layer2.1.conv1"] == "integer"
    assert type(made.layer1[1].conv1) is nn.Conv2d  # a nested name: MQBench knew those of the top level only
    calibrated(made, x)
    assert made(x).isfinite().all()
    without = prepare_by_platform(
        model, "Tensorrt", {"extra_quantizer_dict": {"exclude_function_type": [operator.add]}}, example_inputs=x
    )
    kept = prepare_by_platform(model, "Tensorrt", example_inputs=x)
    assert (verdicts(kept)["add"], verdicts(without)["add"]) == ("integer", "float")


def test_academic_mode_of_openvino(x):
    class Joins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
            self.norm, self.last = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.last(self.norm(torch.cat([self.a(x), self.b(x)], 1)))

    made = {}
    for on in (False, True):
        config = {"extra_quantizer_dict": {"academic_mode": on}}
        made[on] = prepare_by_platform(Joins().eval(), "OPENVINO", config, example_inputs=x)
    assert [verdicts(m)["cat"] for m in made.values()] != ["float", "float"]
    assert verdicts(made[True])["cat"] == "float"
    with pytest.raises(ConfigError, match=r"academic_mode is for BackendType.OPENVINO, not for BackendType.SNPE"):
        prepare_by_platform(Joins(), "SNPE", {"extra_quantizer_dict": {"academic_mode": True}}, example_inputs=x)


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.scale, self.act = nn.Conv2d(3, 4, 3), Scale(3.0), nn.ReLU()
        self.other, self.shared = nn.Conv2d(4, 4, 1), Scale(2.0)

    def forward(self, x):
        y = self.other(self.act(self.scale(self.conv(x))))
        return y + self.shared(y)


def fuse_scale(conv, scale):
    made = copy.deepcopy(conv)
    with torch.no_grad():
        made.weight.mul_(scale.factor)
        made.bias.mul_(scale.factor)
    return made


class Doubled(ConvBNReLUFusion):
    def fuse(self, conv, scale):
        return fuse_scale(fuse_scale(conv, scale), Scale(2.0))


@pytest.mark.parametrize(
    ("fuse", "factor"),
    [
        ({"additional_fuser_method_mapping": {(nn.Conv2d, Scale): fuse_scale}}, 1.0),
        ({"additional_fusion_pattern": {(Scale, nn.Conv2d): Doubled}}, 2.0),
        (
            {
                "additional_fuser_method_mapping": {(nn.Conv2d, Scale): fuse_scale},
                "additional_fusion_pattern": {(Scale, nn.Conv2d): ConvBNReLUFusion},
            },
            1.0,
        ),
        (
            {
                "additional_fusion_pattern": {
                    (nn.ReLU, (Scale, nn.Conv2d)): lambda c, s, r: nn.Sequential(fuse_scale(c, s), r)
                }
            },
            1,
        ),
    ],
)
def test_methods_of_ones_own_fuse(x, fuse, factor):
    model = Scaled().eval()
    made = prepared(model, x, extra_fuse_dict=fuse)
    assert type(made.scale) is nn.Identity
    first = made.conv[0] if isinstance(made.conv, nn.Sequential) else made.conv
    assert isinstance(first, QuantConv2d)
    assert torch.allclose(first.weight, model.conv.weight * 3 * factor)
    assert type(made.shared) is Scale  # what it reads has another user
    if factor == 1:
        assert torch.allclose(made(x), model(x), atol=1e-5)


def test_bitwrights_own_fusing_keeps_the_names_where_it_does_the_same(model, x):
    fuse = {"additional_fuser_method_mapping": {(nn.Linear, nn.BatchNorm1d): fuse_linear_bn}}
    made = prepare_by_platform(model, "Tensorrt", {"extra_fuse_dict": fuse}, example_inputs=x)
    assert set(model.state_dict()) <= set(made.state_dict())
    assert made.fc.folded_norm is made.norm
    academic = prepared(model, x, extra_fuse_dict=fuse)
    assert isinstance(academic.norm, nn.Identity)
    assert torch.allclose(academic(x), model(x), atol=1e-5)


def test_a_quantized_module_of_ones_own(model, x):
    class MyConv(QuantConv2d):
        calls = 0

        def forward(self, *args):
            type(self).calls += 1
            return super().forward(*args)

    fuse = {"additional_qat_module_mapping": {nn.Conv2d: MyConv}}
    made = prepared(model, x, extra_fuse_dict=fuse)
    made(x)
    assert type(made.layer1[0].conv1) is MyConv
    assert MyConv.calls >= 9
    assert type(prepared(model, x).layer1[0].conv1) is QuantConv2d  # for that model only
    deconv = {"additional_qat_module_mapping": {nn.ConvTranspose2d: qnn.qat.ConvTranspose2d}}
    assert isinstance(prepared(model, x, extra_fuse_dict=deconv).deconv, qnn.qat.ConvTranspose2d)


def test_leaves_and_concrete_args(x):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.conv(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Inner(), nn.Conv2d(3, 3, 1)

        def forward(self, x, double=False):
            y = self.last(self.inner(x))
            return y * 2 if double else y

    model = Outer().eval()
    assert "inner.conv" in verdicts(prepared(model, x))
    for made in (
        prepared(model, x, leaf_module=[Inner]),
        prepare_by_platform(
            model,
            "Academic",
            ACADEMIC,
            custom_tracer=type("T", (), {"is_leaf_module": lambda s, m, n: n == "inner"})(),
            example_inputs=x,
        ),
    ):
        assert type(made.inner) is Inner
        assert "inner.conv" not in verdicts(made)
        assert isinstance(made.last, QuantConv2d)
        assert torch.equal(made(x), model(x))
    for key in ("concrete_args", "concrect_args"):
        made = prepared(model, x, **{key: {"double": True}})
        assert torch.equal(made(x), model(x, double=True))


def test_switches(model, x):
    made = prepared(model, x)
    parts = [
        [q for n, q in quantizers(made).items() if "_weight_quantizer" in n],
        [q for n, q in quantizers(made).items() if "_weight_quantizer" not in n],
    ]
    with pytest.raises(CalibrationError, match=r"has no range yet"):
        enable_quantization(made)
    assert all(q.mode is Mode.OFF for part in parts for q in part)
    calibrated(made, x, 2 * x)
    assert all(q.mode is Mode.QUANTIZE and q.calibrated for part in parts for q in part)
    reference = bw.calibrate(prepared(model, x), [x, 2 * x])
    assert torch.equal(made(x), reference(x))
    disable_all(made)
    assert torch.equal(made(x), model(x))
    enable_quantization(made)
    assert torch.equal(made(x), reference(x))
    enable_calibration_woquantization(made, "act_fake_quant")
    made(10 * x)
    assert all(q.mode is Mode.OFF for q in parts[0])
    assert all(q.mode is Mode.OBSERVE for q in parts[1])
    enable_calibration_woquantization(made, "weight_fake_quant")
    made(x)
    enable_quantization(made)
    wider = quantizers(made)["bitwright.quantizers.x"].scale / quantizers(reference)["bitwright.quantizers.x"].scale
    assert wider > 1.5
    with pytest.raises(
        UnknownNameError, match=r"no quantizer has 'act_fakequant' in its name: did you mean 'act_fake_"
    ):
        enable_calibration_woquantization(made, "act_fakequant")


def test_ranges_that_follow_the_data(model, x):
    made = prepared(model, x)
    enable_all(made)
    first = quantizers(made)["bitwright.quantizers.x"]
    made(x)
    small = first.scale.clone()
    made(100 * x)
    assert first.scale > 2 * small
    enable_quantization(made)
    fixed = first.scale.clone()
    made(1000 * x)
    assert torch.equal(first.scale, fixed)
    enable_quantization(made, act_cali_on=True)
    weight = made.fc.weight_quantizer
    before = weight.scale.clone()
    with torch.no_grad():
        made.fc.weight.mul_(5)
    made(1000 * x)
    assert first.scale > fixed
    assert torch.equal(weight.scale, before)
    enable_quantization(made, weight_cali_on=True)
    made(x)
    assert torch.allclose(weight.scale, before * 5)
    enable_calibration_quantization(made, "weight_fake_quant")
    assert first.mode is Mode.OFF
    assert weight.mode is Mode.QUANTIZE


def test_a_model_that_waits_for_its_first_call(model, x):
    model.layer1.train()
    waiting = prepare_by_platform(model, "Tensorrt")
    assert [n for n, _ in waiting.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert waiting.fc.weight is not model.fc.weight
    optimizer = torch.optim.SGD(waiting.parameters(), lr=0.1)
    waiting.load_state_dict(model.state_dict())
    copied = copy.deepcopy(waiting)
    enable_calibration(waiting)
    waiting(x)
    assert ledger_of(waiting).backend.name == "tensorrt"
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held <= {id(p) for p in waiting.parameters()}
    enable_quantization(waiting)
    reference = bw.calibrate(bw.prepare(model, x, "tensorrt"), [x])
    assert torch.equal(waiting.eval()(x), reference(x))
    again = copy.deepcopy(waiting)
    assert torch.equal(again(x), reference(x))
    assert torch.equal(calibrated(copied, x).eval()(x), reference(x))


def test_modes_and_frozen_norms(model, x):
    model.train()
    made = prepared(model, x)
    assert made.training
    assert not made.layer1[0].bn1.training
    before = made.layer1[0].bn1.running_mean.clone()
    made.train()(x)
    assert torch.equal(made.layer1[0].bn1.running_mean, before)
    free = prepare_by_platform(model, "Academic", ACADEMIC, freeze_bn=False, example_inputs=x)
    free(x)
    assert not torch.equal(free.layer1[0].bn1.running_mean, before)
    assert type(free.layer1[0].bn1) is nn.BatchNorm2d
    still = prepare_by_platform(model, "Academic", ACADEMIC, is_qat=False, example_inputs=x)
    assert not any(m.training for m in still.modules())
    assert made.fc.weight is not model.fc.weight


@pytest.mark.parametrize("method", ["LearnableFakeQuantize", "PACTFakeQuantize", "DSQFakeQuantize", "TqtFakeQuantize"])
def test_an_optimizer_made_before_calibration_has_what_is_learned(model, x, method):
    scheme = {"bit": 4, "pot_scale": method.startswith("Tqt")}
    qconfig = {
        "w_fakequantize": "LearnableFakeQuantize",
        "a_fakequantize": method,
        "w_qscheme": {"bit": 4, "per_channel": True},
        "a_qscheme": scheme,
    }
    made = prepare_by_platform(model, "Academic", {"extra_qconfig_dict": qconfig}, example_inputs=x)
    assert torch.equal(made(x), model(x))
    held = {id(p) for p in torch.optim.SGD(made.parameters(), lr=0.1).param_groups[0]["params"]}
    made.load_state_dict(model.state_dict())
    calibrated(made, x)
    assert held == {id(p) for p in made.parameters()}
    made(x).square().sum().backward()
    assert made.fc.weight_quantizer.method.scale.grad.abs().sum() > 0
    again = prepare_by_platform(model, "Academic", {"extra_qconfig_dict": qconfig}, example_inputs=x)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(x), made(x))


def config(**sections):
    return {**copy.deepcopy(ACADEMIC), **sections}


BAD = [
    (config(extra_qconfig={}), r"extra_config has no key 'extra_qconfig': did you mean 'extra_qconfig_dict'"),
    (config(extra_qconfig_dict={"w_observr": "MSEObserver"}), r"no key 'w_observr': did you mean 'w_observer'"),
    (config(extra_qconfig_dict={"w_observer": "EMAMinMax"}), r"unknown observer 'EMAMinMax': did you mean 'EMAMinMaxO"),
    (
        config(extra_qconfig_dict={"a_fakequantize": "Fixed"}),
        r"unknown method 'Fixed': did you mean 'FixedFakeQuantize'",
    ),
    (config(extra_qconfig_dict={"a_observer": 3}), r"a_observer is a name in quotes, not 3"),
    (config(extra_qconfig_dict={"w_qscheme": {"bit": "8"}}), r"w_qscheme: bit is a number of bits, not '8'"),
    (config(extra_qconfig_dict={"w_qscheme": {"symmetry": 1}}), r"w_qscheme: symmetry is True or False, not 1"),
    (config(extra_qconfig_dict={"w_qscheme": 8}), r"w_qscheme must be a mapping of settings, not 8"),
    (config(extra_qconfig_dict={"w_fakeq_params": 8}), r"w_fakeq_params must be a mapping of arguments, not 8"),
    (
        config(extra_qconfig_dict={"a_qscheme": {"symmetry": False, "symmetric_range": True}}),
        r"a_qscheme: symmetric_range is for symmetric schemes",
    ),
    (
        config(extra_qconfig_dict={**ACADEMIC["extra_qconfig_dict"], "a_observer_extra_args": {"ema_ration": 0.5}}),
        r"has no option 'ema_ration': did you mean 'ema_ratio'",
    ),
    (config(extra_quantizer_dict={"exclude_modul_name": []}), r"no key 'exclude_modul_name': did you mean 'exclude_mo"),
    (
        config(extra_quantizer_dict={"exclude_module_name": ["layer1.1.conv3", "hed"]}),
        r"exclude_module_name: the model has no module 'layer1.1.conv3': did you mean 'layer1.1.conv.*; .*'hed'",
    ),
    (
        config(extra_quantizer_dict={"exclude_node_name": ["layer1_1_conv3"]}),
        r"'node:layer1_1_conv3' matches no.*conv1",
    ),
    (config(extra_quantizer_dict={"additional_node_name": ["sigmoi"]}), r"'node:sigmoi' matches no.*'node:sigmoid'"),
    (config(extra_quantizer_dict={"additional_node_name": [3]}), r"additional_node_name has names in quotes, not 3"),
    (
        config(extra_quantizer_dict={"additional_module_type": "Upsample"}),
        r"has module classes such as torch.nn.Upsamp",
    ),
    (config(extra_quantizer_dict={"exclude_function_type": [nn.ReLU]}), r"has functions such as operator.add, not"),
    (config(extra_quantizer_dict={"exclude_node_name": {"a": 1}}), r"exclude_node_name must be a list, not"),
    (
        config(preserve_attr={"": ["func3"]}),
        r"the model \(Net\) has no attribute 'func3' to preserve: did you mean 'func1'",
    ),
    (
        config(preserve_attr={"bakbone": ["func2"]}),
        r"preserve_attr names the module 'bakbone', .*: did you mean 'backbone'",
    ),
    (config(preserve_attr=["func1"]), r"preserve_attr maps names of modules to lists of attributes"),
    (config(extra_fuse_dict={"additional_fusion_patterns": {}}), r"did you mean 'additional_fusion_pattern'"),
    (
        config(extra_fuse_dict={"additional_fusion_pattern": {(Scale, nn.Conv2d): ConvBNReLUFusion}}),
        r"no method fuses \(",
    ),
    (
        config(extra_fuse_dict={"additional_fusion_pattern": {(Scale, nn.Conv2d): 3}}),
        r"needs ConvBNReLUFusion, a class",
    ),
    (
        config(extra_fuse_dict={"additional_fuser_method_mapping": {F.relu: fuse_scale}}),
        r"a key is a tuple of module cl",
    ),
    (
        config(extra_fuse_dict={"additional_fuser_method_mapping": {nn.Conv2d: 3}}),
        r"\(Conv2d\) needs a function of the",
    ),
    (
        config(extra_fuse_dict={"additional_qat_module_mapping": {nn.Conv2d: 3}}),
        r"maps module classes to module classes",
    ),
    (
        config(extra_fuse_dict={"additional_fuser_method_mapping": {(nn.Conv2d, nn.BatchNorm2d): lambda a, b: None}}),
        r"<lambda> must return the module that layer1.0.conv1, layer1.0.bn1 become, not None",
    ),
    (
        config(extra_fuse_dict={"additional_fuser_method_mapping": {(nn.Conv2d, nn.BatchNorm2d): fuse_scale}}),
        r"fuse_scale cannot fuse layer1.0.conv1, layer1.0.bn1: AttributeError",
    ),
    (config(leaf_module=[3]), r"leaf_module has module classes, not 3"),
    (config(leaf_module=[Scale]), r"the leaf 'type:.*Scale' is no module of the model"),
    (config(concrete_args=[3]), r"concrete_args must be a mapping"),
    (config(concrete_args={"a": 1}, concrect_args={"a": 1}), r"both concrete_args and concrect_args"),
    ([], r"extra_config must be a mapping of settings, not \[\]"),
]


@pytest.mark.parametrize(("extra_config", "message"), BAD)
@pytest.mark.parametrize("lazy", [True, False])
def test_refusals_leave_the_model_untouched(model, x, extra_config, message, lazy):
    model.layer2.train()
    model.fc.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    with pytest.raises(ConfigError, match=message):
        prepare_by_platform(model, "Academic", extra_config, example_inputs=None if lazy else x)(x)
    assert same(before, snapshot(model))


def test_more_refusals(model, x):
    with pytest.raises(UnknownNameError, match=r"unknown BackendType 'Tensort': did you mean 'Tensorrt'"):
        prepare_by_platform(model, "Tensort")
    with pytest.raises(ConfigError, match=r"the backend must be a BackendType or its name, not 3"):
        prepare_by_platform(model, 3)
    with pytest.raises(ConfigError, match=r"must be a torch.nn.Module, not list"):
        prepare_by_platform([], "Tensorrt")
    with pytest.raises(ConfigError, match=r"tensorrt has no weights in uint8"):
        prepare_by_platform(model, "Tensorrt", SEED)
    made = prepared(model, x)
    with pytest.raises(ConfigError, match=r"prepared already"):
        prepare_by_platform(made, "Tensorrt")
    with pytest.raises(ConfigError, match=r"this Net has no quantizer: prepare it first"):
        enable_calibration(model)
    with pytest.raises(ConfigError, match=r"custom_tracer must be an fx.Tracer with is_leaf_module, not 3"):
        prepare_by_platform(model, "Tensorrt", custom_tracer=3)


def test_what_needs_the_graph_says_that_the_model_waits_for_it(model, x):
    waiting = prepare_by_platform(model, "Tensorrt")
    with pytest.raises(
        ConfigError, match=r"this Net is prepared when it is first called: run it once, or give example_"
    ):
        bw.calibrate(waiting, [x])
    for prepare in (bw.prepare, prepare_by_platform):
        with pytest.raises(ConfigError, match=r"this model is prepared already"):
            prepare(waiting, "Tensorrt")
    waiting(x)
    assert torch.equal(bw.calibrate(waiting, [x])(x), bw.calibrate(bw.prepare(model, x, "tensorrt"), [x])(x))


def test_a_refused_first_call_can_be_made_again(model, x):
    waiting = prepare_by_platform(model, "Tensorrt")
    with pytest.raises(ConfigError, match="does not take the example inputs"):
        waiting(x[0, 0])
    assert torch.equal(waiting(x), model(x))
