"""TensorQuantizer made from a QuantDescriptor: one class, one arithmetic, learned ranges, and what it refuses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.errors import CalibrationError, ConfigError
from bitwright.quantizer import Mode, QuantDescriptor, TensorQuantizer, quantizers


def make(*args, **fields):
    return TensorQuantizer(QuantDescriptor(**fields), *args)


def formula(x, amax, low=-128, high=127):
    step = torch.as_tensor(amax, dtype=torch.float32) / high
    return torch.clamp(torch.round(x / step), low, high) * step


X = torch.tensor([[-3.0, 0.31, 1.02], [0.5, -0.77, 0.25]])


def test_a_descriptor_and_a_spec_make_the_same_class():
    described, plain = TensorQuantizer(QuantDescriptor(num_bits=4)), TensorQuantizer("int8")
    made = [
        described,
        plain,
        TensorQuantizer(),
        TensorQuantizer(quant_desc=QuantDescriptor()),
        copy.deepcopy(described),
    ]
    assert {type(q) for q in made} == {TensorQuantizer}
    assert (described.mode, plain.mode) == (Mode.QUANTIZE, Mode.OFF)
    assert (described.dynamic, plain.dynamic) == (True, False)
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
        ({"axis": (0, 2)}, X[:, None].expand(2, 4, 3), formula(X[:, None].expand(2, 4, 3), X.abs()[:, None])),
        ({"axis": 0, "amax": [1.0, 0.5]}, X, formula(X, [[1.0], [0.5]])),
        ({"axis": 0, "amax": [[1.0], [0.5]]}, X, formula(X, [[1.0], [0.5]])),
        ({"axis": 0, "amax": 1.0}, X, formula(X, 1.0)),
        ({"axis": 1, "amax": [1.0, 2.0, 3.0]}, X, formula(X, [[1.0, 2.0, 3.0]])),
        ({"scale_amax": 0.5}, X, formula(X, 1.5)),
        ({"amax": 2.0, "scale_amax": 0.5}, X, formula(X, 1.0)),
    ],
)
def test_values(fields, x, expected):
    quantizer = make(**fields)
    assert torch.equal(quantizer(x), expected)
    assert torch.allclose(quantizer(x.double()).float(), expected, rtol=1e-6)
    for dtype in (torch.half, torch.bfloat16):
        low = quantizer(x.to(dtype))
        assert low.dtype == dtype
        assert torch.equal(low, quantizer(x.to(dtype).float()).to(dtype))


def test_double_is_computed_in_double():
    x, step = torch.linspace(-2, 2, 1001, dtype=torch.float64), float(torch.tensor(1.7) / 127)
    assert torch.equal(make(amax=1.7)(x), torch.clamp(torch.round(x / step), -128, 127) * step)


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        ("int8", {}),
        ("int8 narrow", {"narrow_range": True}),
        ("int4 channel:0", {"num_bits": 4, "axis": 0}),
        ("uint8 symmetric", {"unsigned": True}),
        ("e4m3", {"num_bits": (4, 3)}),
        ("e5m2 channel:1", {"num_bits": (5, 2), "axis": 1}),
    ],
)
def test_equal_specs_give_equal_bits(spec, fields):
    torch.manual_seed(0)
    x = torch.randn(64, 33) * 3
    x = x.abs() if "uint" in spec else x
    plain, described = TensorQuantizer(spec), make(**fields)
    assert plain.spec == described.spec
    for quantizer in (plain, described):
        quantizer.observe()
        quantizer(x)
        quantizer.compute_qparams()
        quantizer.quantize()
    assert torch.equal(plain.scale, described.scale)
    y = (torch.randn(64, 33) * 4).requires_grad_()
    with torch.no_grad():
        y.copy_(y.abs() if "uint" in spec else y)
    assert torch.equal(plain(y), described(y))
    assert torch.equal(plain(y.double()), described(y.double()))
    grads = [torch.autograd.grad(q(y).sum(), y)[0] for q in (plain, described)]
    assert torch.equal(*grads)
    assert torch.equal(*(q.integers(y.detach()).float() for q in (plain, described)))
    described.set_qparams(plain.scale)
    assert torch.equal(plain(y), described(y))


@pytest.mark.parametrize(("narrow", "lowest"), [(False, -128), (True, -127)])
def test_narrow_range_holds_on_every_path(narrow, lowest):
    x = torch.tensor([-1.01, 1.01])
    real = make(amax=1.0, narrow_range=narrow, fake_quant=False)
    assert real(x).tolist() == [lowest, 127]
    assert real.scale.item() == pytest.approx(127)
    fake = make(amax=1.0, narrow_range=narrow)
    assert torch.allclose(fake(x), torch.tensor([lowest, 127]) / 127)
    assert torch.allclose(real(x) / real.scale, fake(x))
    assert fake.integers(x).tolist() == [lowest, 127]
    assert fake.integers(x).dtype == torch.int8
    assert float(fake.range()[0]) == pytest.approx(lowest / 127)


@pytest.mark.parametrize(("bits", "top"), [((4, 3), 448.0), ((5, 2), 57344.0)])
def test_fp8(bits, top):
    quantizer = make(num_bits=bits, amax=2.0)
    assert quantizer.maxbound == top
    assert quantizer.step_size.item() == pytest.approx(2 / top)
    x = torch.tensor([0.0, 2.0, -2.0, 1.0, 5.0])
    assert quantizer(x).tolist() == pytest.approx([0, 2, -2, 1, 2])
    assert quantizer.integers(x).dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    assert quantizer.extra_repr().startswith(f"e{bits[0]}m{bits[1]} symmetric tensor")
    assert not quantizer.uniform
    with pytest.raises(ConfigError, match=r"the method 'lsq' rounds to integers: 'e4m3 .*' needs 'FixedFakeQuantize'"):
        TensorQuantizer("e4m3", method="lsq")


def test_the_gradient():
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(make(amax=0.6)(x).sum(), x)
    assert grad.tolist() == [[0, 1, 0], [1, 0, 1]]
    (grad,) = torch.autograd.grad(make(amax=0.6, fake_quant=False)(x).sum(), x)
    assert grad.tolist() == [[0, 1, 0], [1, 0, 1]]


def test_pre_quant_scale():
    quantizer = make(amax=2.0)
    quantizer.pre_quant_scale = torch.tensor([1.0, 2.0, 0.5])
    scaled = X * torch.tensor([1.0, 2.0, 0.5])
    assert torch.equal(quantizer(X), formula(scaled, 2.0))
    assert torch.equal(copy.deepcopy(quantizer)(X), formula(scaled, 2.0))
    quantizer.disable()
    assert torch.equal(quantizer(X), scaled)
    assert not quantizer.uniform
    quantizer.pre_quant_scale = None
    assert quantizer(X) is X


def test_an_empty_tensor_passes():
    assert make()(torch.empty(0, 3)).shape == (0, 3)


def test_dynamic_by_spec():
    quantizer = TensorQuantizer("uint8", dynamic=True)
    quantizer.quantize()
    for x in (X, X * 10):
        step = (x.max() - x.min()) / 255
        assert float((quantizer(x) - x).abs().max()) <= step
    assert not quantizer.calibrated
    with pytest.raises(CalibrationError, match="has no range yet"):
        quantizer.qparams()
    forced = TensorQuantizer("uint8")
    forced.mode = Mode.QUANTIZE
    with pytest.raises(CalibrationError, match="has no range yet: calibrate it"):
        forced(X)


def test_learned_ranges():
    quantizer = make(learn_amax=True, amax=1.0)
    assert quantizer.mode is Mode.QUANTIZE
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
    assert quantizer.uniform  # except for the ends, which a file clips to
    assert [float(end) for end in quantizer.method.limits()] == pytest.approx([-0.5, 0.4])
    quantizer.disable_quant()
    assert not quantizer.uniform
    assert torch.equal(quantizer(X), X.clamp(-0.5, 0.4))
    assert quantizer.quantizes  # it changes tensors
    quantizer.disable_clip()
    assert not quantizer.clip.clip_value_min.requires_grad
    assert torch.equal(quantizer(X), X)
    quantizer.enable_clip()
    assert torch.equal(quantizer(X), X.clamp(-0.5, 0.4))
    quantizer.enable_quant()
    assert torch.equal(quantizer(X), formula(X.clamp(-0.5, 0.4), 0.5))
    with pytest.raises(ValueError, match=r"learn_amax is False. Cannot enable clip."):
        make().enable_clip()
    with pytest.raises(RuntimeError, match="Called init_learn_amax with learn_amax=False"):
        make().init_learn_amax()


@pytest.mark.parametrize(
    ("fields", "x", "error", "message"),
    [
        ({"unsigned": True}, X, TypeError, "Negative values encountered in unsigned quantization: the lowest is -3"),
        ({"axis": 2}, X, ConfigError, r"axis 2 .*is out of range for a tensor of shape \(2, 3\)"),
        ({"axis": -3}, X, ConfigError, r"axis -3 .*is out of range for a tensor of shape \(2, 3\)"),
        (
            {"axis": 0, "amax": [1.0, 2.0, 3.0]},
            X,
            ConfigError,
            r"amax of shape \(3,\) does not fit .* \(2, 3\): it needs one value, or \(2,\)",
        ),
        ({"amax": [1.0, 2.0, 3.0]}, X, ConfigError, r"amax of shape \(3,\) does not fit .* needs one value"),
    ],
)
def test_refusals(fields, x, error, message):
    with pytest.raises(error, match=message):
        make(**fields)(x)


def test_seed_001_third_way():
    torch.manual_seed(0)
    test_input = torch.randn(1, 5, 5, 5, dtype=torch.double)
    quantizer = TensorQuantizer(QuantDescriptor())
    out = F.adaptive_avg_pool2d(quantizer(test_input), 3)
    step = test_input.abs().max() / 127
    expected = torch.clamp(torch.round(test_input / step), -128, 127) * step
    assert torch.equal(out, F.adaptive_avg_pool2d(expected, 3))


@pytest.mark.parametrize(
    "fields", [{}, {"amax": 1.0}, {"axis": 0}, {"num_bits": (4, 3)}, {"unsigned": True}, {"learn_amax": True}]
)
def test_torch_can_compile_and_export_it(fields):
    quantizer, x = make(**fields), torch.rand(4, 5)
    compiled = torch.compile(quantizer, backend="eager", fullgraph=True)(x)  # before anything is computed and kept
    expected = quantizer(x)
    assert torch.equal(compiled, expected)
    assert torch.equal(torch.export.export(quantizer, (x,)).module()(x), expected)
