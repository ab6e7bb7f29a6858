"""Quantize–dequantize against a naive loop, its properties and its gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.numerics import dequantize, quantize, quantize_dequantize
from bitwright.spec import QuantSpec
from tests.numerics.naive import FORMATS, GRAINS, arguments, naive


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["symmetric", "affine"])
def test_every_format_equals_the_definition(name, kind):
    for grain, shape in GRAINS.items():
        spec = QuantSpec.parse(f"{name} {kind} {grain}")
        x = 2 * torch.randn(shape)
        args = arguments(spec, shape)
        q, y = naive(x, *args)
        assert torch.equal(quantize_dequantize(x, *args), y)
        integers = quantize(x, *args, dtype=spec.format.storage)
        assert integers.dtype == spec.format.storage
        assert torch.equal(integers.to(torch.int64), q)
        assert torch.equal(dequantize(integers, args[0], args[1], args[4], args[5]), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grain", GRAINS)
def test_every_dtype_equals_the_definition(dtype, grain):
    spec = QuantSpec.parse(f"uint8 {grain}")
    x = (2 * torch.randn(GRAINS[grain])).to(dtype)
    args = arguments(spec, tuple(x.shape))
    y = quantize_dequantize(x, *args)
    assert y.dtype == dtype
    assert torch.equal(y, naive(x, *args)[1])


def layouts():
    base = torch.randn(4, 6, 5, 3)
    return {
        "contiguous": base,
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base.transpose(0, 3),
        "permuted": base.permute(2, 0, 3, 1),
        "sliced": base[:, ::2, 1:],
        "expanded": base[:1].expand(4, -1, -1, -1),
        "offset": base.reshape(-1)[7 : 7 + 2 * 3 * 4].view(2, 3, 4),
        "one channel": base[:, :1],
    }


@pytest.mark.parametrize("name", layouts())
def test_memory_layout_does_not_matter(name):
    x = layouts()[name]
    for axis in (None, *range(x.ndim)):
        spec = QuantSpec.parse("uint8" if axis is None else f"uint8 channel:{axis}")
        args = arguments(spec, tuple(x.shape))
        y = quantize_dequantize(x, *args)
        assert torch.equal(y, naive(x, *args)[1])
        assert y.stride() == torch.empty_like(x).stride()
        if axis is not None:
            size = next(n for n in (2, 3, 1) if x.shape[axis] % n == 0)
            args = arguments(QuantSpec.parse(f"uint8 group:{size}:{axis}"), tuple(x.shape))
            y = quantize_dequantize(x, *args)
            assert torch.equal(y, naive(x, *args)[1])
            assert y.stride() == torch.empty_like(x).stride()


def test_tensors_without_dimension_or_values():
    scale, zero = torch.tensor(0.5), torch.tensor(3, dtype=torch.int32)
    y = quantize_dequantize(torch.tensor(1.3), scale, zero, 0, 255)
    assert y.shape == ()
    assert float(y) == 1.5
    for shape, axis, size in [((0,), None, ()), ((0, 4), None, ()), ((0, 4), 1, (4,)), ((4, 0), 0, (4,))]:
        s, z = torch.ones(size), torch.zeros(size, dtype=torch.int32)
        empty = torch.empty(shape, requires_grad=True)
        out = quantize_dequantize(empty, s, z, 0, 255, axis)
        assert out.shape == shape
        out.sum().backward()
        assert empty.grad.shape == shape


@pytest.mark.parametrize("seed", range(8))
def test_it_divides_and_does_not_multiply_by_the_reciprocal(seed):
    scale = torch.rand((), generator=torch.Generator().manual_seed(seed)) * 0.1 + 0.001
    zero = torch.tensor(128, dtype=torch.int32)
    x = (torch.arange(-128, 127) + 0.5) * scale  # half way between steps, where the last bit decides
    q, y = naive(x, scale, zero, 0, 255)
    assert torch.equal(quantize_dequantize(x, scale, zero, 0, 255), y)
    assert torch.equal(quantize(x, scale, zero, 0, 255, dtype=torch.uint8).to(torch.int64), q)


def test_half_way_goes_to_even():
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    y = quantize_dequantize(x, torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), -8, 7)
    assert y.tolist() == [-2.0, -2.0, 0.0, 0.0, 2.0, 2.0]


def test_nan_stays_and_infinity_saturates():
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0], requires_grad=True)
    y = quantize_dequantize(x, torch.tensor(0.5), torch.tensor(10, dtype=torch.int32), 0, 255)
    assert math.isnan(y.tolist()[0])
    assert y[1:].tolist() == [122.5, -5.0, 0.0]
    y.sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_an_int32_bias_survives_exactly():
    q = torch.tensor([2**31 - 1, -(2**31) + 1, 16777217], dtype=torch.int32)
    y = dequantize(q, torch.tensor(1.0, dtype=torch.float64), torch.tensor(0, dtype=torch.int32))
    assert y.tolist() == [2147483647.0, -2147483647.0, 16777217.0]


finite = st.floats(-1e4, 1e4, width=32)
scales = st.floats(2**-10, 16.0, width=32)


@st.composite
def problems(draw):
    spec = QuantSpec.parse(f"{draw(st.sampled_from(FORMATS))} affine")
    x = torch.tensor(draw(st.lists(finite, min_size=1, max_size=20)), dtype=torch.float32)
    zero = draw(st.integers(spec.qmin, spec.qmax))
    return x, torch.tensor(draw(scales)), torch.tensor(zero, dtype=torch.int32), spec.qmin, spec.qmax


@given(problems())
def test_error_is_at_most_half_a_step_inside_the_range(problem):
    x, scale, zero, qmin, qmax = problem
    inside = x.clamp(float((qmin - zero) * scale), float((qmax - zero) * scale))
    error = (quantize_dequantize(inside, scale, zero, qmin, qmax) - inside).abs()
    slack = inside.abs() * 2**-22  # the division and the product each round once
    assert bool((error <= scale / 2 + slack).all())


@given(problems())
def test_twice_is_once(problem):
    x, *args = problem
    once = quantize_dequantize(x, *args)
    assert torch.equal(quantize_dequantize(once, *args), once)


@given(problems())
def test_order_is_kept(problem):
    x, *args = problem
    y = quantize_dequantize(x.sort().values, *args)
    assert bool((y[1:] >= y[:-1]).all())


@given(problems())
def test_zero_maps_to_zero(problem):
    _, *args = problem
    assert quantize_dequantize(torch.tensor([0.0, -0.0]), *args).tolist() == [0.0, 0.0]


@given(problems())
def test_results_lie_on_the_grid_and_in_range(problem):
    x, scale, zero, qmin, qmax = problem
    steps = quantize_dequantize(x, scale, zero, qmin, qmax).double() / scale.double() + zero
    assert bool(((steps - steps.round()).abs() < 1e-2).all())
    assert bool((steps.round() >= qmin).all() & (steps.round() <= qmax).all())


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2))
def test_per_channel_is_a_loop_of_per_tensor(seed, outer, channels, axis):
    generator = torch.Generator().manual_seed(seed)
    shape = [outer, 3, 2]
    shape[axis] = channels
    x = torch.randn(shape, generator=generator)
    scale = torch.rand(channels, generator=generator) * 0.1 + 0.01
    zero = torch.randint(0, 256, (channels,), generator=generator, dtype=torch.int32)
    whole = quantize_dequantize(x, scale, zero, 0, 255, axis)
    parts = [quantize_dequantize(part, scale[i], zero[i], 0, 255) for i, part in enumerate(x.unbind(axis))]
    assert torch.equal(whole, torch.stack(parts, axis))


@given(st.integers(0, 2**31), st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_per_group_is_a_loop_of_per_tensor(seed, rows, size):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator)
    scale = torch.rand(rows, 8 // size, generator=generator) * 0.1 + 0.01
    zero = torch.zeros(scale.shape, dtype=torch.int32)
    whole = quantize_dequantize(x, scale, zero, -8, 7, 1, size)
    for row in range(rows):
        for group in range(8 // size):
            columns = slice(group * size, (group + 1) * size)
            part = quantize_dequantize(x[row, columns], scale[row, group], zero[row, group], -8, 7)
            assert torch.equal(whole[row, columns], part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("grain", GRAINS)
def test_gradient_is_straight_through(grain, dtype):
    spec = QuantSpec.parse(f"uint4 {grain}")
    shape = GRAINS[grain]
    args = arguments(spec, shape, reach=2.0)
    x = (2 * torch.randn(shape)).to(dtype).requires_grad_()
    grad = torch.randn(shape).to(dtype)
    quantize_dequantize(x, *args).backward(grad)
    q, _ = naive(x, args[0], args[1], -(10**9), 10**9, args[4], args[5])
    passes = (q >= spec.qmin) & (q <= spec.qmax)
    assert 0 < int(passes.sum()) < passes.numel()
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, grad * passes)


@pytest.mark.parametrize("layout", ["x", "grad", "both"])
def test_gradient_in_any_layout(layout):
    x, grad = 3 * torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3, 5)
    scale, zero = torch.rand(4) * 0.05 + 0.01, torch.full((4,), 8, dtype=torch.int32)
    expected_in = x.clone().requires_grad_()
    quantize_dequantize(expected_in, scale, zero, 0, 63, 1).backward(grad)
    if layout in ("x", "both"):
        x = x.contiguous(memory_format=torch.channels_last)
    if layout in ("grad", "both"):
        grad = grad.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    x = x.requires_grad_()
    quantize_dequantize(x, scale, zero, 0, 63, 1).backward(grad)
    assert torch.equal(x.grad, expected_in.grad)


def test_nothing_but_the_input_is_kept_for_the_gradient():
    x = torch.randn(100, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        quantize_dequantize(x, torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), -8, 7)
    assert sorted(t.numel() for t in saved) == [1, 1, 100]
