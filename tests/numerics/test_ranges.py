"""Scales and zero points from ranges."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.numerics import quantize_dequantize, scale_and_zero_point
from bitwright.spec import QuantSpec
from tests.numerics.naive import FORMATS


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
