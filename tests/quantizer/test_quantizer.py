"""TensorQuantizer: modes, ranges set by hand, copies, and what it refuses."""

import copy

import pytest
import torch
from torch import nn

from bitwright.errors import CalibrationError, ConfigError, UnknownNameError
from bitwright.methods import METHODS, Method, register_method
from bitwright.methods.fixed import FixedFakeQuantize
from bitwright.quantizer import Mode, TensorQuantizer, quantizers

SHAPES = {"uint8": (3, 4), "int8 channel:0": (3, 4), "int4 group:2:1": (3, 4)}


def calibrated(spec="uint8", shape=(3, 4), **options):
    quantizer = TensorQuantizer(spec, **options)
    quantizer.observe()
    quantizer(torch.randn(shape))
    quantizer.compute_qparams()
    quantizer.quantize()
    return quantizer


def same_state(one, other):
    return (
        torch.equal(one.scale, other.scale)
        and torch.equal(one.zero_point, other.zero_point)
        and one.scale.shape == other.scale.shape
        and one.mode is other.mode
    )


# ---------------------------------------------------------------------------------------------------- modes


def test_modes():
    quantizer = TensorQuantizer("uint8")
    x = torch.tensor([-1.0, 0.3, 2.0])
    assert quantizer.mode is Mode.OFF
    assert quantizer(x) is x
    assert quantizer.observer.batches == 0
    quantizer.observe()
    assert quantizer(x) is x
    assert quantizer.observer.batches == 1
    assert not quantizer.calibrated
    quantizer.compute_qparams()
    assert quantizer.calibrated
    quantizer.quantize()
    expected = (
        torch.clamp(torch.round(x / quantizer.scale) + quantizer.zero_point, 0, 255) - quantizer.zero_point
    ) * quantizer.scale
    assert torch.equal(quantizer(x), expected)
    assert quantizer.observer.batches == 1
    quantizer.off()
    assert quantizer(x) is x


def test_quantizing_needs_a_range():
    quantizer = TensorQuantizer("uint8")
    with pytest.raises(CalibrationError, match=r"the quantizer has no range yet: calibrate it, or set_range"):
        quantizer.quantize()
    quantizer.label = "output of conv1"
    with pytest.raises(CalibrationError, match="the quantizer 'output of conv1' has no range yet"):
        quantizer.quantize()
    with pytest.raises(CalibrationError, match="'output of conv1' cannot be calibrated: no data was seen"):
        quantizer.compute_qparams()
    assert quantizer.mode is Mode.OFF


def test_nan_is_named():
    quantizer = TensorQuantizer("int8 channel:0")
    quantizer.label = "conv1.weight"
    quantizer.observe()
    quantizer(torch.tensor([[1.0], [float("nan")]]))
    with pytest.raises(CalibrationError, match=r"'conv1.weight' cannot be calibrated: NaN or infinity was seen"):
        quantizer.compute_qparams()


@pytest.mark.parametrize("spec", SHAPES)
def test_quantized_values_are_few_and_near(spec):
    quantizer = calibrated(spec)
    x = torch.randn(SHAPES[spec])
    y = quantizer(x)
    lo, hi = quantizer.range()
    low, high = float(lo.min()), float(hi.max())
    assert low - 1e-6 <= float(y.min())
    assert float(y.max()) <= high + 1e-6
    assert quantizer.scale.shape == quantizer.spec.param_shape(SHAPES[spec])
    assert torch.equal(quantizer(y), y)


# --------------------------------------------------------------------------------------------- set by hand


def test_set_range():
    quantizer = TensorQuantizer("uint8")
    quantizer.set_range(-1.0, 3.0)
    assert float(quantizer.scale) == pytest.approx(4 / 255)
    assert int(quantizer.zero_point) == 64
    lo, hi = quantizer.range()
    assert (float(lo), float(hi)) == pytest.approx((-1.0, 3.0), abs=4 / 255)
    assert quantizer.scale.shape == ()
    quantizer.set_range(0, 255)
    assert (float(quantizer.scale), int(quantizer.zero_point)) == (1.0, 0)


def test_set_qparams():
    quantizer = TensorQuantizer("int8 channel:0")
    given = torch.tensor([0.5, 0.25])
    quantizer.set_qparams(given)
    given.zero_()
    assert quantizer.scale.tolist() == [0.5, 0.25]
    assert quantizer.zero_point.tolist() == [0, 0]
    whole = TensorQuantizer("uint8")
    whole.set_qparams(torch.tensor([0.5]), torch.tensor([3]))
    assert whole.scale.shape == whole.zero_point.shape == ()


@pytest.mark.parametrize(
    ("spec", "scale", "zero", "error", "message"),
    [
        ("uint8", 0.0, None, CalibrationError, "'t' must be positive and finite, not 0.0"),
        ("uint8", -1.0, None, CalibrationError, "must be positive and finite, not -1.0"),
        ("uint8", float("nan"), None, CalibrationError, "must be positive and finite, not nan"),
        ("int8 channel:0", [1.0, float("inf")], None, CalibrationError, "positive and finite, not inf"),
        (
            "int8",
            1.0,
            3,
            ConfigError,
            r"'t' is symmetric \('int8 symmetric tensor'\): its zero point must be 0",
        ),
        ("uint8", 1.0, 256, ConfigError, r"zero point of the quantizer 't' lies outside \[0, 255\]"),
        ("uint8", 1.0, -1, ConfigError, r"lies outside \[0, 255\]"),
        ("uint8", 1.0, [0, 0], ConfigError, r"scale \(\) and zero point \(2,\) of the quantizer 't' differ"),
        ("uint8", [1.0, 2.0], None, ConfigError, r"a scale of shape \(2,\) does not fit the quantizer 't'"),
        ("int8 channel:0", 1.0, None, ConfigError, r"a scale of shape \(\) does not fit .* channel:0"),
    ],
)
def test_impossible_parameters_are_refused(spec, scale, zero, error, message):
    quantizer = TensorQuantizer(spec)
    quantizer.label = "t"
    with pytest.raises(error, match=message):
        quantizer.set_qparams(torch.tensor(scale), None if zero is None else torch.tensor(zero))
    assert not quantizer.calibrated


def test_impossible_ranges_are_refused():
    quantizer = TensorQuantizer("uint8")
    with pytest.raises(ConfigError, match=r"range of the quantizer ends \(-1.0\) before it begins \(1.0\)"):
        quantizer.set_range(1.0, -1.0)
    with pytest.raises(CalibrationError, match="must be positive and finite"):
        quantizer.set_range(-1.0, float("inf"))


def test_a_copy_is_independent():
    source = calibrated()
    twin = copy.deepcopy(source)
    assert same_state(source, twin)
    twin.set_range(-100.0, 100.0)
    twin.off()
    twin.observe()
    twin(torch.tensor([1000.0]))
    assert source.mode is Mode.QUANTIZE
    assert float(source.scale) < 0.1
    assert source.observer.batches == 1


# ------------------------------------------------------------------------------------------- configuration


def test_options():
    quantizer = TensorQuantizer("uint8", "ema_minmax", observer_options={"ema_ratio": 0.5})
    assert quantizer.observer.ema_ratio == 0.5
    assert isinstance(quantizer.method, FixedFakeQuantize)
    with pytest.raises(ConfigError, match="the observer 'ema_minmax' has no option 'ratio': did you mean 'ema_r"):
        TensorQuantizer("uint8", "ema_minmax", observer_options={"ratio": 0.5})
    with pytest.raises(ConfigError, match="the method 'fixed' has no option 'lr': there are none"):
        TensorQuantizer("uint8", method="fixed", method_options={"lr": 0.5})
    with pytest.raises(UnknownNameError, match="unknown observer 'EMAMinMax': did you mean 'EMAMinMaxObserver'"):
        TensorQuantizer("uint8", "EMAMinMax")
    with pytest.raises(UnknownNameError, match="unknown method 'FixedFake': did you mean 'FixedFakeQuantize'"):
        TensorQuantizer("uint8", method="FixedFake")
    with pytest.raises(UnknownNameError, match="unknown number format 'nit8'"):
        TensorQuantizer("nit8")


def test_what_it_prints():
    quantizer = TensorQuantizer("uint8")
    assert repr(quantizer).startswith("TensorQuantizer(\n  uint8 affine tensor, no range, MinMaxObserver")
    quantizer.set_range(0.0, 255.0)
    quantizer.quantize()
    assert quantizer.extra_repr() == (
        "uint8 affine tensor, range [0, 255], MinMaxObserver, FixedFakeQuantize, quantize"
    )


def test_a_method_is_one_class_with_one_decorator():
    @register_method("DoubleFakeQuantize")
    class Double(Method):
        def __init__(self, spec, factor=2.0):
            super().__init__(spec)
            self.factor = factor

        def forward(self, x, scale, zero_point):
            return x * self.factor

    try:
        quantizer = TensorQuantizer("uint8", method="DoubleFakeQuantize", method_options={"factor": 3.0})
        quantizer.set_range(0, 1)
        quantizer.quantize()
        assert float(quantizer(torch.tensor(2.0))) == 6.0
    finally:
        METHODS.unregister("DoubleFakeQuantize")


@pytest.mark.parametrize(
    ("spec", "axis", "group"), [("int8", None, None), ("int8 channel:1", 1, None), ("int8 group:4:0", 0, 4)]
)
def test_axis_and_group_of_a_method(spec, axis, group):
    method = TensorQuantizer(spec).method
    assert (method.axis, method.group) == (axis, group)


def test_gradient_flows_through_every_mode():
    x = torch.tensor([0.5, 99.0], requires_grad=True)
    quantizer = TensorQuantizer("uint8")
    quantizer.set_range(0.0, 1.0)
    for mode, expected in (
        (Mode.OFF, [1.0, 1.0]),
        (Mode.OBSERVE, [1.0, 1.0]),
        (Mode.QUANTIZE, [1.0, 0.0]),
    ):
        quantizer.mode = mode
        (gradient,) = torch.autograd.grad(quantizer(x).sum(), x)
        assert gradient.tolist() == expected


def test_finding_all_quantizers():
    model = nn.Sequential(nn.Linear(2, 2), TensorQuantizer("uint8"), nn.Sequential(TensorQuantizer("int8")))
    assert list(quantizers(model)) == ["1", "2.0"]
