"""TensorQuantizer made from a QuantDescriptor: values, switches, calibration, saving, and the way to a file."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.calib import HistogramCalibrator, MaxCalibrator
from bitwright.errors import CalibrationError, ConfigError, ExportError
from bitwright.quantizer import DescribedQuantizer, Mode, QuantDescriptor, TensorQuantizer, quantizers


def make(*args, **fields):
    return TensorQuantizer(QuantDescriptor(**fields), *args)


def formula(x, amax, low=-128, high=127):
    scale = torch.tensor(float(high)) / torch.as_tensor(amax, dtype=torch.float32)
    return torch.clamp(torch.round(x * scale), low, high) / scale


X = torch.tensor([[-3.0, 0.31, 1.02], [0.5, -0.77, 0.25]])


# ---------------------------------------------------------------------------------------------------- kinds


def test_one_name_for_two_kinds():
    described = TensorQuantizer(QuantDescriptor(num_bits=4))
    plain = TensorQuantizer("int8")
    assert type(described) is type(TensorQuantizer()) is type(TensorQuantizer(quant_desc=QuantDescriptor()))
    assert type(described) is DescribedQuantizer
    assert isinstance(described, TensorQuantizer)
    assert type(plain) is TensorQuantizer
    assert (described.mode, plain.mode) == (Mode.QUANTIZE, Mode.OFF)
    assert type(copy.deepcopy(described)) is DescribedQuantizer
    assert type(copy.deepcopy(plain)) is TensorQuantizer
    assert list(quantizers(nn.Sequential(described, plain))) == ["0", "1"]


# --------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("fields", "x", "expected"),
    [
        ({}, X, formula(X, 3.0)),
        ({"amax": 1.0}, X, formula(X, 1.0)),
        ({"amax": 1.0, "narrow_range": True}, X, formula(X, 1.0, -127)),
        ({"num_bits": 4, "amax": 2.0}, X, formula(X, 2.0, -8, 7)),
        ({"unsigned": True}, X.abs(), formula(X.abs(), 3.0, 0, 255)),
        ({"axis": 0}, X, formula(X, [[3.0], [0.77]])),
        ({"axis": -1}, X, formula(X, [[3.0, 0.77, 1.02]])),
        ({"axis": (0, 1)}, X, formula(X, X.abs())),
        ({"axis": 0, "amax": [1.0, 0.5]}, X, formula(X, [[1.0], [0.5]])),
        ({"axis": 0, "amax": [[1.0], [0.5]]}, X, formula(X, [[1.0], [0.5]])),
        ({"axis": 1, "amax": [1.0, 2.0, 3.0]}, X, formula(X, [[1.0, 2.0, 3.0]])),
        ({"scale_amax": 0.5}, X, formula(X, 1.5)),
        ({"amax": 2.0, "scale_amax": 0.5}, X, formula(X, 1.0)),
    ],
)
def test_values(fields, x, expected):
    quantizer = make(**fields)
    assert torch.equal(quantizer(x), expected)
    assert torch.equal(quantizer(x.double()).float(), expected)
    for dtype in (torch.half, torch.bfloat16):
        low = quantizer(x.to(dtype))
        assert low.dtype == dtype
        assert torch.equal(low, quantizer(x.to(dtype).float()).to(dtype))


@pytest.mark.parametrize(("narrow", "lowest"), [(False, -128), (True, -127)])
def test_narrow_range_holds_on_every_path(narrow, lowest):
    x = torch.tensor([-1.01, 1.01])
    real = make(amax=1.0, narrow_range=narrow, fake_quant=False)
    assert real(x).tolist() == [lowest, 127]
    assert real.scale.item() == 127
    fake = make(amax=1.0, narrow_range=narrow)
    assert torch.equal(fake(x), torch.tensor([lowest, 127]) / 127)
    assert torch.equal(real(x) / real.scale, fake(x))
    assert fake.integers(x).tolist() == [lowest, 127]
    assert fake.integers(x).dtype == torch.int8
    assert float(fake.range()[0]) == pytest.approx(lowest / 127)


@pytest.mark.parametrize(("bits", "top"), [((4, 3), 448.0), ((5, 2), 57344.0)])
def test_fp8(bits, top):
    quantizer = make(num_bits=bits, amax=2.0)
    assert quantizer.maxbound == top
    assert quantizer.step_size.item() == pytest.approx(2 / top)
    x = torch.tensor([0.0, 2.0, -2.0, 1.0, 5.0])
    assert quantizer(x).tolist() == [0, 2, -2, 1, 2]
    assert quantizer.integers(x).dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    assert "fp8 e" in quantizer.extra_repr()
    plain = TensorQuantizer(f"e{bits[0]}m{bits[1]}")
    plain.set_range(-2.0, 2.0)
    plain.quantize()
    y = torch.linspace(-3, 3, 101)
    assert torch.allclose(plain(y), quantizer(y), atol=1e-6)
    assert not plain.method.uniform
    with pytest.raises(ConfigError, match=r"the method 'lsq' rounds to integers: 'e4m3 .*' needs 'Fp8FakeQuantize'"):
        TensorQuantizer("e4m3", method="lsq")


def test_the_gradient():
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(make(amax=0.6)(x).sum(), x)
    assert grad.tolist() == [[0, 1, 0], [1, 0, 1]]


def test_pre_quant_scale():
    quantizer = make(amax=2.0)
    quantizer.pre_quant_scale = torch.tensor([1.0, 2.0, 0.5])
    assert torch.equal(quantizer(X), formula(X * torch.tensor([1.0, 2.0, 0.5]), 2.0))
    quantizer.disable()
    assert torch.equal(quantizer(X), X * torch.tensor([1.0, 2.0, 0.5]))
    assert not quantizer.method.uniform
    quantizer.pre_quant_scale = None
    assert quantizer(X) is X


def test_an_empty_tensor_passes():
    assert make()(torch.empty(0, 3)).shape == (0, 3)


# ------------------------------------------------------------------------------------------------- switches


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
    assert torch.equal(quantizer(X), formula(X, 3.0))
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


def test_settings_can_change():
    quantizer = make(amax=1.0)
    quantizer.num_bits = 4
    quantizer.narrow_range = True
    assert (quantizer.num_bits, quantizer.maxbound) == (4, 7)
    assert torch.equal(quantizer(X), formula(X, 1.0, -7, 7))
    quantizer.unsigned = True
    assert quantizer.maxbound == 15
    assert str(quantizer.spec) == "uint4 symmetric tensor"
    with pytest.raises(ConfigError, match="num_bits must be >= 1 and <= 16 for an unsigned format, not 99"):
        quantizer.num_bits = 99
    assert quantizer.step_size.item() == pytest.approx(1 / 15)
    assert (quantizer._calibrator._num_bits, quantizer._calibrator._unsigned) == (4, True)
    assert make().step_size is None


# ---------------------------------------------------------------------------------------------- calibration


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
    assert torch.equal(quantizer(x), formula(x, quantizer.amax))


def test_calibration_that_saw_nothing():
    quantizer = make()
    with pytest.raises(RuntimeError, match=r"hasn't seen any tensor. Passing 'strict=False' to `load_calib_amax\(\)`"):
        quantizer.load_calib_amax()
    quantizer.label = "input of fc"
    with pytest.raises(CalibrationError, match="'input of fc' cannot be calibrated: no data was seen"):
        quantizer.compute_qparams()
    with pytest.raises(CalibrationError, match="'input of fc' has no range yet, it takes that of each tensor"):
        quantizer.qparams()
    assert not quantizer.calibrated
    assert not hasattr(quantizer, "_amax")
    quantizer.load_calib_amax(strict=False)
    assert bool(torch.isnan(quantizer.amax))
    quantizer._calibrator = None
    with pytest.raises(RuntimeError, match="Calibrator not created"):
        quantizer.load_calib_amax()
    with pytest.raises(ValueError, match="Calibrator was not created, cannot enable calibration"):
        quantizer.enable_calib()


def test_nan_is_named():
    quantizer = make()
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


def test_learned_ranges():
    quantizer = make(learn_amax=True, amax=1.0)
    assert quantizer.mode == Mode.QUANTIZE | Mode.CLIP
    x = X.clone().requires_grad_()
    y = quantizer(x)
    assert torch.equal(y, formula(X.clamp(-1, 1), 1.0))
    y.sum().backward()
    assert quantizer.clip.clip_value_min.grad.item() == 1
    assert quantizer.clip.clip_value_max.grad.item() == 1
    assert x.grad.tolist() == [[0, 1, 0], [1, 1, 1]]
    quantizer.amax = 0.5
    quantizer.init_learn_amax()
    assert torch.equal(quantizer(X), formula(X.clamp(-0.5, 0.5), 0.5))
    with torch.no_grad():
        quantizer.clip.clip_value_max.fill_(0.4)
    assert torch.equal(quantizer(X), formula(X.clamp(-0.5, 0.4), 0.5))
    assert not quantizer.method.uniform
    quantizer.disable_quant()
    assert torch.equal(quantizer(X), X.clamp(-0.5, 0.4))
    quantizer.disable_clip()
    assert not quantizer.clip.clip_value_min.requires_grad
    assert torch.equal(quantizer(X), X)
    with pytest.raises(ValueError, match=r"learn_amax is False. Cannot enable clip."):
        make().enable_clip()
    with pytest.raises(RuntimeError, match="Called init_learn_amax with learn_amax=False"):
        make().init_learn_amax()


@pytest.mark.parametrize(
    ("fields", "x", "error", "message"),
    [
        ({"unsigned": True}, X, TypeError, "Negative values encountered in unsigned quantization: the lowest is -3"),
        ({"axis": 2}, X, ConfigError, r"axis 2 is out of range for a tensor of shape \(2, 3\)"),
        ({"axis": -3}, X, ConfigError, r"axis -3 is out of range for a tensor of shape \(2, 3\)"),
        (
            {"axis": 0, "amax": [1.0, 2.0, 3.0]},
            X,
            ConfigError,
            r"amax of shape \(3,\) does not fit .* needs one value, or \(2, 1\)",
        ),
        (
            {"amax": [1.0, 2.0, 3.0]},
            X,
            ConfigError,
            r"amax of shape \(3,\) does not fit .* \(2, 3\): it needs one value",
        ),
        ({"fake_quant": False, "amax": 1e-4}, X.half(), ValueError, "scale is too large for FP16 with amax=0.0001"),
    ],
)
def test_refusals(fields, x, error, message):
    with pytest.raises(error, match=message):
        make(**fields)(x)


# -------------------------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize(("axis", "shape"), [(None, ()), (0, (2,)), (-1, (3,))])
def test_it_is_a_tensor_quantizer_like_others(axis, shape):
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
    assert torch.allclose(scale, reach / 127)
    assert (quantizer.method.axis, quantizer.method.group, quantizer.method.uniform) == (axis, None, True)
    assert torch.allclose(quantizer.method(X, scale, zero_point), quantizer(X), atol=1e-6)
    wide = scale if axis is None else scale.reshape([-1 if d == axis % 2 else 1 for d in range(2)])
    assert torch.allclose(quantizer.integers(X).float() * wide, quantizer(X), atol=1e-6)
    quantizer.set_qparams(scale * 2, zero_point)
    assert torch.allclose(quantizer.qparams()[0], scale * 2)
    quantizer.observer.reset()
    assert quantizer.observer.batches == 0
    quantizer.scale = torch.empty(0)
    assert not quantizer.calibrated


def test_parameters_by_hand():
    quantizer = make()
    quantizer.set_range(-1.0, 2.54)
    assert quantizer.amax.item() == pytest.approx(2.54)
    assert [float(e) for e in quantizer.range()] == pytest.approx([-2.56, 2.54])
    with pytest.raises(CalibrationError, match=r"must be positive and finite, not 0.0"):
        quantizer.set_qparams(torch.tensor(0.0))
    with pytest.raises(ConfigError, match="is symmetric: its zero point must be 0"):
        quantizer.set_qparams(torch.tensor(1.0), torch.tensor(3))
    with pytest.raises(
        ConfigError, match=r"a scale of shape \(2,\) does not fit the quantizer: 'int8 symmetric tensor'"
    ):
        quantizer.set_qparams(torch.tensor([1.0, 2.0]))
    with pytest.raises(ConfigError, match=r"range of the quantizer ends \(-1.0\) before it begins \(1.0\)"):
        quantizer.set_range(1.0, -1.0)
    with pytest.raises(ConfigError, match="a MaxCalibrator cannot be merged"):
        quantizer.observer.merge(quantizer.observer)


# ---------------------------------------------------------------------------------------- saving and loading

SAVED = {
    "plain": {},
    "amax": {"amax": 0.7},
    "channels": {"axis": 0, "amax": [1.0, 0.5], "num_bits": 4, "narrow_range": True},
    "unsigned": {"unsigned": True, "amax": 1.5, "scale_amax": 0.9},
    "real": {"fake_quant": False, "amax": 1.0},
    "fp8": {"num_bits": (4, 3), "amax": 1.0},
    "learned": {"learn_amax": True, "amax": 0.8},
}


@pytest.mark.parametrize("into", SAVED)
@pytest.mark.parametrize("kind", SAVED)
def test_state_loads_into_a_quantizer_of_any_state(kind, into):
    source, target = make(**SAVED[kind]), make(**SAVED[into])
    if kind == "learned":
        source.clip.clip_value_max.data.fill_(0.3)
    if kind == "amax":
        source.pre_quant_scale = torch.tensor([1.0, 0.5, 2.0])
    x = X.abs() if kind == "unsigned" else X
    result = nn.Sequential(target).load_state_dict(nn.Sequential(source).state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(target(x), source(x))
    assert target.mode == source.mode
    assert target.descriptor.with_(amax=None) == source.descriptor.with_(amax=None)
    assert set(target.state_dict()) == set(source.state_dict())


def test_other_states_load():
    target = make(amax=0.7)
    target.load_state_dict({"_amax": torch.tensor([[2.0]])})  # as the old toolkit saves it
    assert torch.equal(target(X), formula(X, 2.0))
    target.load_state_dict({})  # as a float model's twin
    assert target.amax.item() == 2.0
    paused = make(amax=0.7)
    paused.disable()
    target.load_state_dict(paused.state_dict())
    assert not target.quantizes
    target.enable()
    assert target.quantizes
    learned = make(learn_amax=True)
    assert learned.load_state_dict({}).missing_keys == []
    with pytest.raises(RuntimeError, match=r"Unexpected key.*colour"):
        target.load_state_dict({"colour": torch.tensor(1)})
    assert all(v.numel() <= 4 for v in paused.state_dict().values())


def test_a_float_checkpoint_loads():
    twin = nn.Sequential(nn.Linear(2, 2), make(amax=1.0))
    plain = nn.Sequential(nn.Linear(2, 2))
    twin.load_state_dict(plain.state_dict())
    assert torch.equal(twin[0].weight, plain[0].weight)


# ------------------------------------------------------------------------------------------------- printing


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "8bit fake per-tensor amax=dynamic calibrator=MaxCalibrator quant"),
        (
            {"axis": 0, "amax": [1.0, 2.0], "narrow_range": True, "num_bits": 4},
            "4bit narrow fake axis=0 amax=[1.0000, 2.0000](2) calibrator=MaxCalibrator quant",
        ),
        (
            {"unsigned": True, "amax": 1.5, "fake_quant": False, "scale_amax": 2.0, "calib_method": "histogram"},
            "unsigned 8bit real per-tensor amax=1.5000 *2.0 calibrator=HistogramCalibrator quant",
        ),
    ],
)
def test_what_it_prints(fields, text):
    assert repr(make(**fields)) == f"TensorQuantizer({text})"
    assert repr(TensorQuantizer(QuantDescriptor(**fields), disabled=True)) == "TensorQuantizer(disabled)"


# ---------------------------------------------------------------------------------------------- to the file


class Pooled(nn.Module):
    """A TensorQuantizer placed by hand in a forward."""

    def __init__(self, **fields):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.quantizer = TensorQuantizer(QuantDescriptor(**fields))

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.quantizer(self.conv(x)), 3)


@pytest.mark.parametrize("fields", [{}, {"calib_method": "histogram"}, {"learn_amax": True}, {"amax": 0.9}])
def test_placed_by_hand_it_calibrates_and_exports(fields, tmp_path):
    torch.manual_seed(0)
    net, x = Pooled(**fields).eval(), torch.randn(4, 3, 11, 11)
    prepared = bw.prepare(net, x, "onnxruntime")
    bw.calibrate(prepared, [x])
    quantizer = prepared.get_submodule("quantizer")
    assert isinstance(quantizer, DescribedQuantizer)
    assert quantizer.mode is Mode.QUANTIZE
    if "amax" in fields:
        assert float(quantizer.qparams()[0] * 127) == pytest.approx(0.9)
    else:
        assert 0.5 < float(quantizer.qparams()[0] * 127) < 5
    path = bw.export(prepared, tmp_path / "pooled.onnx")
    with torch.no_grad():
        expected = prepared(x)
    step = float(quantizer.qparams()[0])
    assert float((bw.run_file(path)(x) - expected).abs().max()) <= step
    assert not net.quantizer.calibrated or fields  # the user's model is left alone


def test_a_failed_calibration_leaves_it_as_it_was():
    x = torch.randn(2, 3, 11, 11)
    for fields in ({}, {"fake_quant": False}):
        prepared = bw.prepare(Pooled(**fields).eval(), x, "onnxruntime")
        quantizer = prepared.get_submodule("quantizer")
        with pytest.raises(CalibrationError, match=r"calibration batch 1 makes NaN or infinity"):
            bw.calibrate(prepared, [x * float("nan")])
        assert quantizer.mode is Mode.QUANTIZE
        assert quantizer.amax is None
        assert quantizer._calibrator.batches == 0


def test_what_no_file_can_say_is_refused(tmp_path):
    x = torch.randn(2, 3, 11, 11)
    prepared = bw.prepare(Pooled().eval(), x, "onnxruntime")
    bw.calibrate(prepared, [x])
    prepared.get_submodule("quantizer").pre_quant_scale = torch.tensor(2.0)
    with pytest.raises(ExportError, match=r"the method 'amax' of the .* has no uniform grid"):
        bw.export(prepared, tmp_path / "m.onnx")


def test_seed_001_third_way():
    torch.manual_seed(0)
    test_input = torch.randn(1, 5, 5, 5, dtype=torch.double)
    quantizer = TensorQuantizer(QuantDescriptor())
    out = F.adaptive_avg_pool2d(quantizer(test_input), 3)
    amax = test_input.abs().max().float()
    assert torch.equal(out, F.adaptive_avg_pool2d(formula(test_input, amax), 3))


@pytest.mark.parametrize(
    "fields", [{}, {"amax": 1.0}, {"axis": 0}, {"num_bits": (4, 3)}, {"unsigned": True}, {"learn_amax": True}]
)
def test_torch_can_compile_and_export_it(fields):
    quantizer, x = make(**fields), torch.rand(4, 5)
    expected = quantizer(x)
    assert torch.equal(torch.compile(quantizer, backend="eager", fullgraph=True)(x), expected)
    assert torch.equal(torch.export.export(quantizer, (x,)).module()(x), expected)
