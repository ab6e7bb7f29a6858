"""Functions of the amax family: values, gradients, fp8, and what they refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.compat.pytorch_quantization import tensor_quant as tq
from bitwright.compat.pytorch_quantization.nn.functional import clip
from bitwright.compat.pytorch_quantization.utils import reduce_amax
from bitwright.errors import ConfigError

LIMITS = {
    (8, False, True): (-127, 127),
    (8, False, False): (-128, 127),
    (8, True, True): (0, 255),
    (4, False, False): (-8, 7),
}


def by_numpy(x, amax, bits, unsigned, narrow):
    """The formula, one rounding at a time."""
    low, high = LIMITS[bits, unsigned, narrow]
    scale = (np.float32(high) / np.asarray(amax, np.float32)).astype(np.float32)
    q = np.clip(np.rint(np.asarray(x, np.float32) * scale), low, high).astype(np.float32)
    return q, scale, (q / scale).astype(np.float32)


@pytest.mark.parametrize("case", LIMITS)
def test_values_to_the_last_bit(case):
    torch.manual_seed(0)
    bits, unsigned, narrow = case
    x = torch.randn(50, 7) * 3
    x = x.abs() if unsigned else x
    for amax in (torch.tensor(1.7), torch.rand(50, 1) + 0.1):
        q, scale, y = by_numpy(x.numpy(), amax.numpy(), bits, unsigned, narrow)
        got, got_scale = tq.tensor_quant(x, amax, bits, unsigned, narrow)
        assert np.array_equal(got.numpy(), q)
        assert np.array_equal(got_scale.numpy(), scale)
        for function in (tq.fake_tensor_quant, tq.legacy_fake_tensor_quant):
            assert np.array_equal(function(x, amax, bits, unsigned, narrow).numpy(), y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_float32(dtype):
    x = torch.linspace(-2, 2, 101).to(dtype)
    expected = by_numpy(x.float().numpy(), 1.3, 8, False, True)[2]
    got = tq.fake_tensor_quant(x, torch.tensor(1.3))
    assert got.dtype == dtype
    assert torch.equal(got, torch.from_numpy(expected).to(dtype))
    integers, scale = tq.tensor_quant(x, torch.tensor(1.3))
    assert integers.dtype == scale.dtype == dtype


def test_double_stays_double():
    x = torch.linspace(-2, 2, 11, dtype=torch.float64)
    y = tq.fake_tensor_quant(x, torch.tensor(2.0))
    assert y.dtype == torch.float64
    scale = float(np.float32(127) / np.float32(2))
    assert torch.equal(y, torch.round(x * scale).clamp(-127, 127) / scale)


def test_rounds_half_to_even():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5])
    assert tq.tensor_quant(x, torch.tensor(127.0))[0].tolist() == [0, 2, 2, 0, -2]


@settings(max_examples=40, deadline=None)
@given(st.floats(2.0**-20, 1e6, width=32), st.integers(2, 12), st.booleans())
def test_error_is_at_most_half_a_step_and_the_grid_is_kept(amax, bits, narrow):
    x = torch.linspace(-1, 1, 41) * amax
    y = tq.fake_tensor_quant(x, torch.tensor(amax), bits, False, narrow)
    step = amax / (2 ** (bits - 1) - 1)
    assert float((y - x).abs().max()) <= step * 0.5001
    assert torch.allclose(tq.fake_tensor_quant(y, torch.tensor(amax), bits, False, narrow), y, rtol=1e-6)


def test_an_amax_of_zero_gives_zeros_and_scale_one():
    x = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    amax = torch.tensor([[2.0**-24], [2.0]])
    q, scale = tq.tensor_quant(x, amax)
    assert q[0].tolist() == [0, 0]
    assert scale[0].item() == 1
    assert tq.fake_tensor_quant(x, amax)[0].tolist() == [0, 0]
    assert tq.fake_tensor_quant(x, amax)[1, 0].item() == 2.0


def test_the_gradient_passes_within_the_range():
    x = torch.tensor([-2.0, -1.0, 0.3, 1.0, 1.1], requires_grad=True)
    for y in (tq.fake_tensor_quant(x, torch.tensor(1.0)), tq.tensor_quant(x, torch.tensor(1.0))[0]):
        (grad,) = torch.autograd.grad((y * torch.arange(1.0, 6.0)).sum(), x)
        assert grad.tolist() == [0, 2, 3, 4, 0]


def test_affine():
    x = torch.tensor([-1.5, -1.0, 0.1, 2.0, 3.0], requires_grad=True)
    low, high = torch.tensor(-1.0), torch.tensor(2.0)
    y = tq.fake_affine_tensor_quant(x, low, high)
    step = 3.0 / 255
    zero = round(-1.0 / step)
    expected = torch.clamp(torch.round(x.detach() / step), zero, zero + 255) * step
    assert torch.allclose(y, expected, atol=1e-6)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.tolist() == [0, 1, 1, 1, 0]
    with pytest.raises(ConfigError, match=r"the range ends \(-1\) before it begins \(2\)"):
        tq.fake_affine_tensor_quant(x, 2.0, -1.0)


def fp8_values(exponent, mantissa, bias, top):
    """Every number of the format, by its definition."""
    values = {m * 2.0 ** (1 - bias - mantissa) for m in range(2**mantissa)}
    values |= {(1 + m / 2**mantissa) * 2.0 ** (e - bias) for e in range(1, 2**exponent) for m in range(2**mantissa)}
    return sorted(v for v in values if v <= top)


@pytest.mark.parametrize(("function", "form"), [(tq.scaled_e4m3, (4, 3, 7, 448)), (tq.scaled_e5m2, (5, 2, 15, 57344))])
def test_fp8_gives_the_nearest_number(function, form):
    grid = torch.tensor(fp8_values(*form))
    assert torch.equal(function(grid), grid.masked_fill(grid < 2**-24, 0))
    torch.manual_seed(0)
    x = torch.randn(300).abs() * 3
    distance = (x[:, None] - grid).abs().min(1).values
    assert torch.allclose((function(x) - x).abs(), distance, atol=0)
    assert torch.equal(function(-x), -function(x))
    amax = torch.tensor(2.0)
    scaled = function(x.clamp(max=2), amax)
    scale = form[3] / 2.0
    assert torch.allclose(scaled, function(x.clamp(max=2) * scale) / scale, atol=1e-7)
    assert function(torch.tensor([5.0, -5.0]), amax).tolist() == [2, -2]


def test_fp8_gradient_and_limits():
    x = torch.tensor([-3.0, 0.4, 1e-9, 3.0], requires_grad=True)
    y = tq.scaled_e4m3(x, torch.tensor(1.0))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.tolist() == [0, 1, 1, 0]
    assert y[2].item() == 0
    assert tq.scaled_e4m3(x.detach(), torch.tensor(0.0)).tolist() == [0, 0, 0, 0]
    with pytest.raises(NotImplementedError, match="scaled_e4m3 has E=4 and M=3, not E=5 and M=2"):
        tq.scaled_e4m3(x, None, 5, 2)


def test_clip_learns_its_ends():
    x = torch.tensor([[-3.0, -0.5], [0.5, 4.0], [5.0, 0.0]], requires_grad=True)
    low, high = (torch.tensor(v, requires_grad=True) for v in (-1.0, 2.0))
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    y = clip(x, low, high)
    assert y.tolist() == [[-1, -0.5], [0.5, 2], [2, 0]]
    grads = torch.autograd.grad((y * weights).sum(), (x, low, high))
    assert grads[0].tolist() == [[0, 2], [3, 0], [0, 6]]
    assert (grads[1].item(), grads[2].item()) == (1, 9)
    with pytest.raises(
        ConfigError, match=r"an end of clip that is learned can only be scalar, not a tensor of shape \(2,\)"
    ):
        clip(x, torch.zeros(2, requires_grad=True), high)


def test_reduce_amax():
    x = torch.arange(24.0).reshape(2, 3, 4) - 20
    assert reduce_amax(x).shape == ()
    for axis in (0, (0, 2), -1, [1]):
        for keep in (True, False):
            expected = np.abs(x.numpy()).max(axis=tuple(axis) if isinstance(axis, list) else axis, keepdims=keep)
            assert np.array_equal(reduce_amax(x, axis, keep).numpy(), expected)
    with pytest.raises(ConfigError, match=r"axis 3 is out of range for a tensor of shape \(2, 3, 4\)"):
        reduce_amax(x, 3)
    with pytest.raises(ConfigError, match=r"a tensor of shape \(0,\) has no largest value"):
        reduce_amax(torch.empty(0))


def test_refusals():
    x = torch.tensor([-1.0, 1.0])
    with pytest.raises(TypeError, match="Negative values encountered in unsigned quantization: the lowest is -1"):
        tq.fake_tensor_quant(x, torch.tensor(1.0), 8, True)
    for function in (tq.tensor_quant, tq.fake_tensor_quant, tq.scaled_e4m3):
        with pytest.raises(ValueError, match="Negative values in amax: the lowest is -2"):
            function(x, torch.tensor([1.0, -2.0]))
    with pytest.raises(
        ValueError, match=r"scale is too large for FP16 with amax=0.0001: it is .* largest half is 65504"
    ):
        tq.tensor_quant(x.half(), torch.tensor(1e-4))


def test_the_descriptors():
    assert tq.QuantDescriptor() == tq.QUANT_DESC_8BIT_PER_TENSOR
    assert tq.QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR.unsigned
    assert [getattr(tq, f"QUANT_DESC_8BIT_CONV{d}D_WEIGHT_PER_CHANNEL").axis for d in (1, 2, 3)] == [0, 0, 0]
    assert [getattr(tq, f"QUANT_DESC_8BIT_CONVTRANSPOSE{d}D_WEIGHT_PER_CHANNEL").axis for d in (1, 2, 3)] == [1, 1, 1]
    assert tq.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW.axis == 0
    assert tq.ScaledQuantDescriptor is tq.QuantDescriptor
