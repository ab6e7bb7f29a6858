"""Stochastic rounding against its definition."""

import pytest
import torch
from hypothesis import given, settings

from bitwright.methods import METHODS
from bitwright.spec import QuantSpec
from tests.methods.cases import Case, noise_of, on_grid, seeds, specs


def test_stochastic_rounding_leaves_whole_numbers_of_steps():
    method = METHODS.get("stochastic")(QuantSpec.parse("int8"))
    x = torch.arange(-128.0, 128.0).repeat(2000)
    assert torch.equal(method(x, torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)), x)


@given(specs, seeds)
@settings(max_examples=30)
def test_stochastic(spec, seed):
    case = Case(spec, seed)
    method = case.method("StochasticFakeQuantize")
    s, z = case.wide(case.scale), case.wide(case.zero_point)
    torch.manual_seed(1)
    y, grads = case.ours(method)
    torch.manual_seed(1)
    v = case.x.detach() / s
    up = noise_of(case) + 0.5 < v - torch.floor(v)
    q = torch.clamp(torch.floor(v) + up + z, spec.qmin, spec.qmax)
    assert torch.equal(y, (q - z) * s)
    v = torch.round(case.x.detach() / s) + z
    assert torch.equal(grads["x"], case.g * ((v >= spec.qmin) & (v <= spec.qmax)))
    method.eval()
    assert torch.equal(method(case.x, case.scale, case.zero_point).detach(), on_grid(case, method, case.x))


def test_stochastic_rounding_keeps_the_mean():
    method = METHODS.get("stochastic")(QuantSpec.parse("int8"))
    x = torch.full((20000,), 0.3)
    y = method(x, torch.tensor(1.0), torch.tensor(0, dtype=torch.int32))
    assert y.unique().tolist() == [0.0, 1.0]
    assert float(y.mean()) == pytest.approx(0.3, abs=0.02)
