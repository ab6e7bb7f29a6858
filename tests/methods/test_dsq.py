"""DSQ against the paper's staircase."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.methods.cases import Case, seeds, specs, ste


def staircase(x, alpha, low, high, steps):
    """The soft quantizer of the paper, with its tanh in units of x."""
    delta = (high - low) / steps
    i = torch.floor((x - low) / delta).detach().clamp(0, steps - 1)
    middle = low + (i + 0.5) * delta
    k = torch.log(2 / alpha - 1) / delta
    s = 1 / torch.tanh(0.5 * k * delta)
    inside = low + delta * (i + (s * torch.tanh(k * (x - middle)) + 1) / 2)
    return torch.where(x > high, high, torch.where(x < low, low, inside))


@given(specs, seeds, st.sampled_from([0.1, 0.2, 0.4]))
def test_dsq(spec, seed, alpha):
    case = Case(spec, seed)
    case.x = case.x.detach().double().requires_grad_()
    case.g = case.g.double()
    method = case.method("DSQFakeQuantize", alpha=alpha).double()
    with torch.no_grad():
        grid = method.grid(case.zero_point)

    def reference(x, alpha, upper, lower=None):
        # the ends as integers allow them, with the gradient of the learned ones
        step, z = case.wide(grid.step), case.wide(grid.zero_point)
        high = ste((spec.qmax - z) * step, case.wide(upper))
        low = case.wide(upper) * spec.qmin / spec.qmax if lower is None else case.wide(lower)
        low = ste((spec.qmin - z) * step, low)
        soft = staircase(x, case.wide(alpha), low, high, spec.qmax - spec.qmin)
        q = torch.clamp(torch.round(x / step) + z, spec.qmin, spec.qmax)
        return ste((q - z) * step, soft)

    case.check(method, reference, tolerance=1e-5)
    s, z = method.qparams(case.scale, case.zero_point)
    torch.testing.assert_close(s, case.scale, rtol=1e-5, atol=0)
    assert torch.equal(z, case.zero_point)


def test_dsq_staircase_has_the_gradient_that_finite_differences_find():
    x = torch.tensor([-3.0, -0.83, -0.31, 0.07, 0.41, 0.77, 2.0], dtype=torch.float64, requires_grad=True)
    alpha, low, high = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.2, -1.0, 1.0))
    assert torch.autograd.gradcheck(lambda *a: staircase(*a, 7), (x, alpha, low, high))
