"""MQBench's extra_config: the seed's as printed, and an effect of every key on quantizers."""

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bitwright.compat.mqbench.nn as qnn
from bitwright.compat.mqbench import (
    BackendType,
    prepare_by_platform,
    to_recipe,
)
from bitwright.compat.mqbench.fake_quantize import QuantizeBase
from bitwright.compat.mqbench.observer import ObserverBase
from bitwright.errors import ConfigError
from bitwright.preparation import ledger_of
from bitwright.quantizer import quantizers
from bitwright.recipe import Recipe
from tests.compat.mqbench.nets import ACADEMIC, SEED, Net, calibrated, prepared, same, snapshot, verdicts


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
    assert type(made.layer1[1].conv1) is nn.Conv2d  # a nested name: MQBench knew only the top level
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


def test_own_classes_of_mqbench_are_refused_with_the_way_out():
    class Mine(ObserverBase):
        def forward(self, x):
            return x

    with pytest.raises(ConfigError, match="Mine does not define observe and range: see docs/how-to/custom"):
        Mine(torch.quint8)
    with pytest.raises(ConfigError, match=r"Own cannot derive from QuantizeBase.*docs/how-to/custom-method\.md"):

        class Own(QuantizeBase):
            pass


def test_quantizers_have_what_those_of_mqbench_had():
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = prepare_by_platform(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), "Tensorrt", example_inputs=x)
    found = [module for module in model.modules() if isinstance(module, QuantizeBase)]
    assert len(found) == len(quantizers(model)) > 1
    weight = model.get_submodule("0").weight_quantizer
    assert (weight.quant_min, weight.quant_max, weight.bitwidth, weight.ch_axis) == (-127, 127, 8, 0)
    assert (weight.qscheme, weight.dtype, weight.is_per_channel) == (torch.per_channel_symmetric, torch.qint8, True)
    (tensor,) = [q for q in found if q is not weight]
    assert (tensor.ch_axis, tensor.qscheme, tensor.pot_scale) == (-1, torch.per_tensor_symmetric, False)
    tensor.enable_observer()
    assert (int(tensor.observer_enabled), int(tensor.fake_quant_enabled)) == (1, 0)
    tensor(x)
    tensor.enable_fake_quant()
    assert (int(tensor.observer_enabled), int(tensor.fake_quant_enabled)) == (0, 1)
    scale, zero_point = tensor.calculate_qparams()
    assert (float(scale), int(zero_point)) == (pytest.approx(float(x.abs().max()) / 127), 0)
    assert torch.equal(tensor(x), (x / scale).round().clamp(-127, 127) * scale)
    tensor.disable_fake_quant()
    assert torch.equal(tensor(x), x)
    with pytest.raises(ImportError, match=r"mqbench.prepare_by_platform has no ParamsTable: see bitwright.backends"):
        from bitwright.compat.mqbench.prepare_by_platform import ParamsTable  # noqa: F401
