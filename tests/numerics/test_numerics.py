"""Quantize–dequantize against a naive loop, its properties and gradient, and how torch's tools see it."""

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bitwright.numerics import dequantize, qdq, quantize, quantize_dequantize, scale_and_zero_point
from bitwright.numerics.fused import SMALL, Fused
from bitwright.numerics.pooling import global_average_pool
from bitwright.quantizer import TensorQuantizer
from bitwright.spec import QuantSpec

FORMATS = [f"int{b}" for b in range(2, 17)] + [f"uint{b}" for b in range(1, 17)]


def place_of(index, axis, group, ndim):
    """Which scale a value at ``index`` has."""
    if axis is None:
        return ()
    axis %= ndim
    if group is None:
        return (index[axis],)
    return tuple(i // group if d == axis else i for d, i in enumerate(index))


def naive(x, scale, zero_point, qmin, qmax, axis=None, group=None):
    """The definition, value by value in numpy: integers and what they stand for."""
    wide = np.float64 if x.dtype == torch.float64 else np.float32
    values = x.detach().to(torch.float64 if wide is np.float64 else torch.float32).numpy()
    q, y = np.empty(values.shape, np.int64), np.empty(values.shape, wide)
    for index in np.ndindex(values.shape):
        place = place_of(index, axis, group, values.ndim)
        s, z = wide(scale.numpy()[place]), int(zero_point.numpy()[place])
        q[index] = min(max(int(np.rint(values[index] / s)) + z, qmin), qmax)
        y[index] = wide(q[index] - z) * s
    return torch.from_numpy(q), torch.from_numpy(y).to(x.dtype)


def params_for(spec, shape, reach=3.0):
    """Scales that let some values saturate, and zero points anywhere in range."""
    size = spec.param_shape(shape)
    scale = (0.5 + torch.rand(size)) * reach / (spec.qmax - spec.qmin)
    zero = torch.zeros(size, dtype=torch.int32)
    if not spec.symmetric:
        zero = torch.randint(spec.qmin, spec.qmax + 1, size, dtype=torch.int32)
    return scale, zero


def arguments(spec, shape, reach=3.0):
    grain = spec.granularity
    return (
        *params_for(spec, shape, reach),
        spec.qmin,
        spec.qmax,
        getattr(grain, "axis", None),
        getattr(grain, "size", None),
    )


GRAINS = {
    "tensor": (4, 6),
    "channel:0": (4, 3, 2, 2),
    "channel:1": (2, 5, 3),
    "channel:-1": (3, 4),
    "group:2:-1": (3, 8),
    "group:3:0": (6, 4),
    "group:4:1": (2, 8, 3),
}


# ------------------------------------------------------------------------------------- against the definition


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


# ------------------------------------------------------------------------------------------------ properties

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


# -------------------------------------------------------------------------------------------------- gradient


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


# ------------------------------------------------------------------------------------------- torch's own eyes

CASES = {
    "tensor": (lambda: torch.randn(4, 8), None, None, ()),
    "no dimension": (lambda: torch.tensor(1.5), None, None, ()),
    "empty": (lambda: torch.randn(0, 8), 1, None, (8,)),
    "channel": (lambda: torch.randn(4, 8, 3), 1, None, (8,)),
    "channels_last": (lambda: torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last), 1, None, (4,)),
    "sliced": (lambda: torch.randn(4, 8)[:, ::2], 0, None, (4,)),
    "expanded": (lambda: torch.randn(1, 8).expand(4, 8), 1, None, (8,)),
    "group": (lambda: torch.randn(4, 8), -1, 4, (4, 2)),
    "group of another axis": (lambda: torch.randn(2, 8, 3), 1, 4, (2, 2, 3)),
    "half": (lambda: torch.randn(4, 8).half(), None, None, ()),
    "double": (lambda: torch.randn(4, 8).double(), 0, None, (4,)),
}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    make, axis, group, size = CASES[name]
    x = make()
    scale, zero = torch.rand(size) * 0.1 + 0.01, torch.zeros(size, dtype=torch.int32)
    ops = torch.ops.bitwright
    args = (scale, zero, -128, 127, axis, group)
    results = [
        torch.library.opcheck(ops.quantize_dequantize.default, (x, *args)),
        torch.library.opcheck(ops.quantize_dequantize.default, (x.detach().clone().requires_grad_(), *args)),
        torch.library.opcheck(ops.quantize_dequantize_backward.default, (torch.ones_like(x), x, *args)),
        torch.library.opcheck(ops.quantize.default, (x, *args), {"dtype": torch.int8}),
        torch.library.opcheck(ops.dequantize.default, (quantize(x, *args, dtype=torch.int8), scale, zero, axis, group)),
    ]
    assert all(set(r.values()) == {"SUCCESS"} for r in results)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 4, 5)])
def test_global_average_pool(shape):
    x = torch.randn(shape)
    expected = x.flatten(2).mean(2).reshape(*shape[:2], *(1 for _ in shape[2:]))
    assert torch.allclose(global_average_pool(x), expected, atol=1e-6)
    checked = torch.library.opcheck(torch.ops.bitwright.global_average_pool.default, (x,))
    assert set(checked.values()) == {"SUCCESS"}


def calls_of(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_compile_sees_one_operator():
    seen = []

    def backend(graph_module, example_inputs):
        seen.extend(calls_of(graph_module.graph))
        return graph_module.forward

    quantizer = TensorQuantizer("int8 channel:0")
    quantizer.set_range(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0]))
    quantizer.quantize()
    compiled = torch.compile(quantizer, backend=backend, fullgraph=True)
    x = torch.randn(2, 5)
    assert torch.equal(compiled(x), quantizer(x))
    assert seen == ["bitwright.quantize_dequantize"]


def test_export_sees_one_operator():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.quantizer = TensorQuantizer("uint8")
            self.quantizer.set_range(-1.0, 2.0)
            self.quantizer.quantize()

        def forward(self, x):
            return self.quantizer(x) * 2

    net, x = Net(), torch.randn(3, 4)
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(net, (x,), dynamic_shapes=shapes)
    assert calls_of(program.graph) == ["bitwright.quantize_dequantize.default", "aten.mul.Tensor"]
    more = torch.randn(7, 4)
    assert torch.equal(program.module()(more), net(more))


def test_the_compiled_kernel_gives_the_same_bits(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    x = 3 * torch.randn(4, 16, SMALL // 16)
    x.view(-1)[:4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    scale, zero = torch.rand(16, 1) * 0.1 + 0.01, torch.randint(0, 256, (16, 1), dtype=torch.int32)
    forward, backward = Fused(qdq._forward_kernel.eager), Fused(qdq._backward_kernel.eager)
    for fused, args in ((forward, (x,)), (backward, (x, torch.randn_like(x)))):
        got = fused(*args, scale, zero, 0, 255)
        (kernel,) = fused._kernels.values()
        assert kernel is not fused.eager
        expected = fused.eager(*args, scale, zero, 0, 255)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


def test_one_compiled_kernel_serves_views_of_all_shapes(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    compiled = Fused(qdq._forward_kernel.eager)
    monkeypatch.setattr(qdq, "_forward_kernel", compiled)
    scale, zero = torch.tensor(0.1), torch.tensor(7, dtype=torch.int32)
    shapes = [(8, 4, 32, 32), (5, 77, 64), (3, 2, 5, 7, 211), (2, 100, 100), (40000,), (7, 3001), (2, 3, 4, 5, 6, 53)]
    tensors = [torch.randn(s) for s in shapes]
    tensors += [t.transpose(0, -1) for t in tensors] + [t.unsqueeze(0)[0].unflatten(0, (1, -1)) for t in tensors]
    for x in tensors:
        got = qdq._forward(x, scale, zero, 0, 255)
        assert torch.equal(got, (torch.clamp(torch.round(x / scale) + zero, 0, 255) - zero) * scale)
    (kernel,) = compiled._kernels.values()
    assert kernel is not compiled.eager  # it would be, had torch given up recompiling


def test_compilation_waits_until_it_pays(monkeypatch):
    monkeypatch.delenv("BITWRIGHT_COMPILE", raising=False)
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f) or f)
    monkeypatch.setattr("bitwright.numerics.fused.WARM_UP", 3 * SMALL)
    fused = Fused(lambda x: x + 1)
    small, large = torch.zeros(SMALL - 1), torch.zeros(SMALL)
    for _ in range(9):
        fused(small)
    for _ in range(3):
        fused(large)
    assert compiled == []
    assert fused(large)[0] == 1
    assert len(compiled) == 1
    monkeypatch.setenv("BITWRIGHT_COMPILE", "0")
    assert not fused._worth_compiling(SMALL)


def test_what_cannot_be_compiled_runs_eagerly(monkeypatch, caplog):
    def refuse(*_args, **_options):
        def run(*_):
            raise RuntimeError("no compiler here")

        return run

    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", refuse)
    fused = Fused(qdq._forward_kernel.eager)
    x, scale, zero = torch.randn(SMALL), torch.tensor(0.1), torch.tensor(0, dtype=torch.int32)
    with caplog.at_level(logging.WARNING):
        first, second = (fused(x, scale, zero, -8, 7) for _ in range(2))
    assert torch.equal(first[:9], naive(x[:9], scale, zero, -8, 7)[1])
    assert torch.equal(first, second)
    assert len(caplog.records) == 1
    assert "could not be compiled (RuntimeError: no compiler here); it runs eagerly" in caplog.text


# ---------------------------------------------------------------------------------------- scales from ranges


@given(
    st.sampled_from(FORMATS),
    st.booleans(),
    st.floats(-1e6, 1e6, width=32),
    st.floats(0, 1e6, width=32),
)
def test_scale_and_zero_point(name, symmetric, low, width):
    spec = QuantSpec(name, symmetric=symmetric)
    lo, hi = torch.tensor(low), torch.tensor(low) + torch.tensor(width)
    scale, zero = scale_and_zero_point(lo, hi, spec)
    assert (scale.dtype, zero.dtype, scale.shape, zero.shape) == (torch.float32, torch.int32, (), ())
    bottom, top = min(float(lo), 0.0), max(float(hi), 0.0)
    tiny = 2.0**-60
    if symmetric:
        reach = max(-bottom, top) if spec.format.signed else top
        assert float(scale) == pytest.approx(max(reach / spec.qmax, tiny), rel=1e-6)
        assert int(zero) == 0
        return
    assert float(scale) == pytest.approx(max((top - bottom) / (spec.qmax - spec.qmin), tiny), rel=1e-6)
    assert spec.qmin <= int(zero) <= spec.qmax
    exact = spec.qmin - bottom / float(scale)
    assert abs(int(zero) - min(max(exact, spec.qmin), spec.qmax)) <= 0.5 + 0.01
    ends = torch.tensor([bottom, top, 0.0])
    back = quantize_dequantize(ends, scale, zero, spec.qmin, spec.qmax)
    assert bool(((back - ends).abs() <= scale * 0.51 + ends.abs() * 2**-20).all())
    assert float(back[2]) == 0.0


@given(st.sampled_from(FORMATS), st.booleans(), st.floats(2**-20, 1e6, width=32))
def test_power_of_two(name, symmetric, reach):
    spec = QuantSpec(name, symmetric=symmetric, power_of_two=True)
    plain = spec.with_(power_of_two=False)
    lo, hi = torch.tensor(-reach), torch.tensor(reach)
    scale, free = scale_and_zero_point(lo, hi, spec)[0], scale_and_zero_point(lo, hi, plain)[0]
    assert math.frexp(float(scale))[0] == 0.5
    assert abs(math.log2(float(scale)) - math.log2(float(free))) <= 0.5 + 1e-5


def test_ranges_of_every_kind():
    spec = QuantSpec.parse("uint8")
    lo = torch.tensor([-1.0, 0.0, 2.0, -3.0, 0.0, -3e38])
    hi = torch.tensor([3.0, 2.0, 4.0, -1.0, 0.0, 3e38])
    scale, zero = scale_and_zero_point(lo, hi, spec)
    assert bool(torch.isfinite(scale).all())
    assert zero.tolist()[:5] == [64, 0, 0, 255, 0]
    expected = [4 / 255, 2 / 255, 4 / 255, 3 / 255, 2.0**-60]
    assert scale.tolist()[:5] == pytest.approx(expected, rel=1e-6)


def test_narrow_and_wide_symmetric_share_the_top():
    lo, hi = torch.tensor(-127.0), torch.tensor(100.0)
    for text in ("int8", "int8 narrow"):
        scale, zero = scale_and_zero_point(lo, hi, QuantSpec.parse(text))
        assert (float(scale), int(zero)) == (1.0, 0)
