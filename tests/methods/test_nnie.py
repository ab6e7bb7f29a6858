"""NNIE against its definition in double precision."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.spec import QuantSpec
from tests.methods.cases import GRAINS, Case, seeds


@given(st.sampled_from(["int8", "int4", "int3", "int2", "uint8", "uint4"]), st.sampled_from(GRAINS), seeds)
def test_nnie(form, grain, seed):
    spec = QuantSpec.parse(f"{form} symmetric {grain}")
    case = Case(spec, seed)
    method = case.method("NNIEFakeQuantize")
    rate, m = (spec.qmax + 1) / 8, spec.qmax
    c = case.wide(case.scale * spec.qmax).double()
    z = torch.round(rate * torch.log2(c)) - m
    x = case.x.detach().double()
    lowest = torch.where(x < 0, 1.0, 0.0)
    code = (torch.round(rate * torch.log2(x.abs())) - z).clamp(max=m)
    expected = torch.sign(x) * 2 ** ((torch.maximum(code, lowest) + z) / rate)
    expected[x.abs() <= 2 ** ((lowest + z) / rate) / 2] = 0
    if not spec.format.signed:
        expected = expected.clamp(min=0)
    y, grads = case.ours(method)
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-7)
    assert torch.equal(grads["x"], case.g)
