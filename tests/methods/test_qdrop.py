"""QDrop against LSQ on the values that it quantizes."""

import pytest
import torch
from hypothesis import given, settings

from bitwright.methods import METHODS
from bitwright.spec import QuantSpec
from tests.methods.cases import Case, noise_of, seeds, specs


@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_qdrop_quantizes_with_its_probability(prob):
    method = METHODS.get("qdrop")(QuantSpec.parse("int4"), prob=prob)
    x = torch.randn(100_000)
    y = method(x, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))
    assert float((y != x).float().mean()) == pytest.approx(prob, abs=0.0 if prob in (0, 1) else 0.01)


@given(specs, seeds)
@settings(max_examples=30)
def test_qdrop(spec, seed):
    case = Case(spec, seed)
    method = case.method("QDropFakeQuantize", prob=0.5)
    plain = case.method("lsq", use_grad_scaling=False, learn_zero_point=False)
    torch.manual_seed(1)
    y, grads = case.ours(method)
    torch.manual_seed(1)
    some = noise_of(case) < 0
    g, case.g = case.g, case.g * some
    quantized, expected = case.ours(plain)
    assert torch.equal(y, torch.where(some, quantized, case.x.detach()))
    torch.testing.assert_close(grads["x"], expected["x"] + g * ~some)
    torch.testing.assert_close(grads["scale"], expected["scale"])
    case.g = g
    method.eval()
    everything = case.ours(method)
    assert torch.equal(everything[0], quantized)
