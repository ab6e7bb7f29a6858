"""tanh and its slope against double precision."""

import pytest
import torch

from bitwright.numerics.hyperbolic import tanh_and_slope


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
def test_tanh_and_its_slope(dtype, most):
    small = torch.logspace(-30, 1, 20_001, dtype=dtype)
    x = torch.cat([torch.linspace(-30, 30, 400_001, dtype=dtype), small, -small])
    t, slope = tanh_and_slope(x)
    exact = torch.tanh(x.double())
    assert float((t.double() - exact).abs().max()) <= most
    assert float((slope.double() - torch.cosh(x.double()) ** -2).abs().max()) <= most
    assert float((t.double() / exact - 1)[x != 0].abs().max()) <= 2 * most
    assert torch.equal(tanh_and_slope(-x)[0], -t)
    special = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")], dtype=dtype)
    t, slope = tanh_and_slope(special)
    torch.testing.assert_close(t[:3], torch.tensor([0.0, 1.0, -1.0], dtype=dtype), rtol=0, atol=most)
    torch.testing.assert_close(slope[:3], torch.tensor([1.0, 0.0, 0.0], dtype=dtype), rtol=0, atol=most)
    assert t[3].isnan()
