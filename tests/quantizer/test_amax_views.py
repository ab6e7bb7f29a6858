"""The names of pytorch-quantization on every quantizer: switches, settings, calibration and amax."""

import pytest
import torch

from bitwright.errors import CalibrationError, ConfigError
from bitwright.quantizer import Mode, QuantDescriptor, TensorQuantizer
from bitwright.quantizer.amax_views import AmaxViews
from bitwright.quantizer.calibrators import HistogramCalibrator, MaxCalibrator
from bitwright.quantizer.stored_range import StoredRange

X = torch.tensor([[-3.0, 0.31, 1.02], [0.5, -0.77, 0.25]])


def make(*args, **fields):
    return TensorQuantizer(QuantDescriptor(**fields), *args)


def quantized(x, amax, low=-128, high=127):
    step = torch.as_tensor(amax) / high
    return torch.clamp(torch.round(x / step), low, high) * step


def test_the_views_override_nothing():
    names = {name for name in vars(AmaxViews) if not name.startswith("__")}
    others = {name for cls in StoredRange.__mro__ for name in vars(cls)} | set(vars(TensorQuantizer))
    assert not names & others


def test_the_switches_are_one_mode():
    quantizer = TensorQuantizer(QuantDescriptor(), if_quant=False, if_calib=True)
    assert quantizer.mode is Mode.OBSERVE
    quantizer.enable_quant()
    assert quantizer.mode == Mode.OBSERVE | Mode.QUANTIZE
    quantizer.disable()
    assert not quantizer.observes
    assert not quantizer.quantizes
    assert quantizer(X) is X
    assert quantizer._calibrator.batches == 0
    assert (quantizer._disabled, quantizer._if_quant, quantizer._if_calib, quantizer._if_clip) == (
        True,
        True,
        True,
        False,
    )
    quantizer.enable()
    assert torch.equal(quantizer(X), quantized(X, 3.0))
    assert quantizer._calibrator.batches == 1
    quantizer.disable_calib()
    assert quantizer.mode is Mode.QUANTIZE
    quantizer.disable_quant()
    assert quantizer.mode is Mode.OFF
    assert not TensorQuantizer(QuantDescriptor(), True).quantizes
    quantizer.quantize()
    quantizer.off()
    quantizer.enable()
    assert quantizer.mode is Mode.OFF


def test_a_quantizer_by_spec_has_them_too():
    quantizer = TensorQuantizer("int8 channel:0")
    assert (quantizer.num_bits, quantizer.axis, quantizer.unsigned, quantizer.fake_quant) == (8, 0, False, True)
    assert quantizer.amax is None
    quantizer.set_qparams(torch.tensor([0.5, 1.0]))
    assert quantizer.amax.tolist() == [63.5, 127.0]
    quantizer.amax = [1.0, 2.0]
    assert quantizer.amax.tolist() == [1.0, 2.0]
    quantizer.enable_quant()
    assert torch.equal(quantizer(X), quantized(X, torch.tensor([[1.0], [2.0]])))
    quantizer.disable()
    assert quantizer(X) is X
    with pytest.raises(RuntimeError, match="Calibrator not created"):
        quantizer.load_calib_amax()


def test_settings_can_change():
    quantizer = make(amax=1.0)
    quantizer.num_bits = 4
    quantizer.narrow_range = True
    assert (quantizer.num_bits, quantizer.maxbound) == (4, 7)
    assert torch.equal(quantizer(X), quantized(X, 1.0, -7, 7))
    quantizer.unsigned = True
    assert quantizer.maxbound == 15
    assert str(quantizer.spec) == "uint4 symmetric tensor"
    with pytest.raises(ConfigError, match="num_bits must be >= 1 and <= 16 for an unsigned format, not 99"):
        quantizer.num_bits = 99
    assert quantizer.step_size.item() == pytest.approx(1 / 15)
    assert (quantizer._calibrator._num_bits, quantizer._calibrator._unsigned) == (4, True)
    quantizer.observer.reset()
    assert quantizer._calibrator._num_bits == 4
    assert make().step_size is None


def test_a_changed_spec_keeps_the_range():
    quantizer = TensorQuantizer("uint8")
    quantizer.set_range(-1.0, 3.0)
    quantizer.num_bits = 4
    assert str(quantizer.spec) == str(quantizer.method.spec) == str(quantizer.observer.spec) == "uint4 affine tensor"
    assert [float(end) for end in quantizer.range()] == pytest.approx([-1.0, 3.0], abs=4 / 15)


@pytest.mark.parametrize(
    ("method", "kind", "arguments"),
    [
        ("max", MaxCalibrator, ()),
        ("histogram", HistogramCalibrator, ("percentile",)),
        ("histogram", HistogramCalibrator, ("mse",)),
    ],
)
def test_calibration_as_the_old_way(method, kind, arguments):
    torch.manual_seed(0)
    x = torch.randn(2000)
    quantizer = make(calib_method=method)
    assert isinstance(quantizer._calibrator, kind)
    assert quantizer.observer is quantizer.observer is quantizer._calibrator
    quantizer.disable_quant()
    quantizer.enable_calib()
    assert torch.equal(quantizer(x), x)
    quantizer.load_calib_amax(*arguments)
    quantizer.disable_calib()
    quantizer.enable_quant()
    expected = kind(8, None, False)
    expected.collect(x)
    assert torch.equal(quantizer.amax, expected.compute_amax(*arguments))
    assert torch.equal(quantizer._amax, quantizer.amax)
    assert torch.equal(quantizer(x), quantized(x, quantizer.amax))


def test_calibration_that_saw_nothing():
    quantizer = make()
    with pytest.raises(RuntimeError, match=r"hasn't seen any tensor. Passing 'strict=False' to `load_calib_amax\(\)`"):
        quantizer.load_calib_amax()
    quantizer.label = "input of fc"
    with pytest.raises(CalibrationError, match="'input of fc' cannot be calibrated: no data was seen"):
        quantizer.compute_qparams()
    with pytest.raises(CalibrationError, match="'input of fc' has no range yet"):
        quantizer.qparams()
    assert not quantizer.calibrated
    assert not hasattr(quantizer, "_amax")
    quantizer.load_calib_amax(strict=False)
    assert bool(torch.isnan(quantizer.amax))
    quantizer._calibrator = None
    assert quantizer._calibrator is None
    with pytest.raises(RuntimeError, match="Calibrator not created"):
        quantizer.load_calib_amax()
    with pytest.raises(ValueError, match="Calibrator was not created, cannot enable calibration"):
        quantizer.enable_calib()
    quantizer.observe()
    with pytest.raises(RuntimeError, match="Calibrator was not created"):
        quantizer(X)


def test_nan_is_named():
    for method in ("max", "histogram"):
        quantizer = make(calib_method=method)
        quantizer.observe()
        quantizer(torch.tensor([1.0, float("nan")]))
        with pytest.raises(CalibrationError, match="cannot be calibrated: NaN or infinity was seen"):
            quantizer.compute_qparams()


def test_amax_by_hand():
    quantizer = make(axis=0)
    assert quantizer.amax is None
    quantizer.amax = [[1.0], [2.0]]
    quantizer.amax = torch.tensor([[3.0], [4.0]])
    assert quantizer.amax.tolist() == [[3.0], [4.0]]
    quantizer.amax = None
    assert quantizer.amax.tolist() == [[3.0], [4.0]]
    with pytest.raises(TypeError, match=r"Changing shape when setting amax is not allowed: .* has \(2, 1\), not \(\)"):
        quantizer.amax = 1.0
    with pytest.raises(ValueError, match="Negative values in amax: the lowest is -1"):
        quantizer.amax = [[-1.0], [1.0]]
    quantizer._amax.mul_(2)  # the buffer itself is the range
    assert torch.equal(quantizer(X), quantized(X, torch.tensor([[6.0], [8.0]])))
    del quantizer._amax
    assert torch.equal(quantizer(X), quantized(X, X.abs().amax(1, keepdim=True)))


@pytest.mark.parametrize(("axis", "shape"), [(None, ()), (0, (2,)), (-1, (3,))])
def test_it_calibrates_like_others(axis, shape):
    quantizer = make(axis=axis)
    assert quantizer.scale.numel() == 0
    quantizer.observe()
    quantizer(X)
    assert quantizer.observer.batches == 1
    assert quantizer.observer.range()[1].shape == shape
    quantizer.compute_qparams()
    quantizer.quantize()
    scale, zero_point = quantizer.qparams()
    assert scale.shape == zero_point.shape == quantizer.scale.shape == shape
    assert quantizer.calibrated
    reach = X.abs().amax() if axis is None else X.abs().amax(1 - axis % 2)
    assert torch.equal(scale, reach / 127)
    assert (quantizer.method.axis, quantizer.method.group, quantizer.uniform) == (axis, None, True)
    assert torch.equal(quantizer.method(X, scale, zero_point), quantizer(X))
    wide = scale if axis is None else scale.reshape([-1 if d == axis % 2 else 1 for d in range(2)])
    assert torch.equal(quantizer.integers(X).float() * wide, quantizer(X))
    quantizer.set_qparams(scale * 2, zero_point)
    assert torch.equal(quantizer.qparams()[0], scale * 2)
    quantizer.observer.reset()
    assert quantizer.observer.batches == 0
    quantizer.forget_range()
    assert not quantizer.calibrated
    assert quantizer.amax is None


def test_parameters_by_hand():
    quantizer = make()
    quantizer.set_range(-1.0, 2.54)
    assert quantizer.amax.item() == pytest.approx(2.54)
    assert [float(e) for e in quantizer.range()] == pytest.approx([-2.56, 2.54])
    with pytest.raises(CalibrationError, match=r"must be positive and finite, not 0.0"):
        quantizer.set_qparams(torch.tensor(0.0))
    with pytest.raises(ConfigError, match=r"is symmetric .*: its zero point must be 0"):
        quantizer.set_qparams(torch.tensor(1.0), torch.tensor(3))
    with pytest.raises(
        ConfigError, match=r"a scale of shape \(2,\) does not fit the quantizer: 'int8 symmetric tensor'"
    ):
        quantizer.set_qparams(torch.tensor([1.0, 2.0]))
    with pytest.raises(ConfigError, match=r"range of the quantizer ends \(-1.0\) before it begins \(1.0\)"):
        quantizer.set_range(1.0, -1.0)


def test_merging_what_calibrators_have_seen():
    for kind in (MaxCalibrator, HistogramCalibrator):
        parts, whole = [kind(8, None, False) for _ in range(2)], kind(8, None, False)
        for part, x in zip(parts, (X, X * 3), strict=True):
            part.collect(x)
            whole.collect(x)
        parts[0].merge(parts[1])
        assert torch.equal(parts[0].amax(), whole.amax())
    with pytest.raises(ConfigError, match="cannot merge HistogramCalibrator"):
        MaxCalibrator().merge(HistogramCalibrator())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "int8 symmetric tensor, dynamic range, MaxCalibrator, AmaxFakeQuantize, quantize"),
        (
            {"axis": 0, "amax": [1.0, 2.0], "narrow_range": True, "num_bits": 4},
            "int4 symmetric narrow channel:0, range [-2, 2], MaxCalibrator, AmaxFakeQuantize, quantize",
        ),
        (
            {"unsigned": True, "amax": 1.5, "scale_amax": 2.0, "calib_method": "histogram"},
            "uint8 symmetric tensor, range [0, 3], HistogramCalibrator, AmaxFakeQuantize, quantize",
        ),
    ],
)
def test_what_it_prints(fields, text):
    assert make(**fields).extra_repr() == text
    assert make(True, **fields).extra_repr() == text.removesuffix("quantize") + "disabled"
