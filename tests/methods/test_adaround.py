"""AdaRound against the paper's formula."""

import torch
from hypothesis import given

from bitwright.methods import METHODS
from bitwright.spec import QuantSpec
from tests.methods.cases import SHAPE, Case, layouts, seeds, specs, ste


@given(specs, seeds, layouts)
def test_adaround(spec, seed, layout):
    case = Case(spec, seed, layout)
    method = case.method("AdaRoundFakeQuantize")
    s, z = case.wide(case.scale), case.wide(case.zero_point)
    nearest = (torch.clamp(torch.round(case.x.detach() / s) + z, spec.qmin, spec.qmax) - z) * s
    assert torch.equal(method(case.x, case.scale, case.zero_point), nearest)
    method.init(case.x, case.scale, case.zero_point)
    # it begins with the values themselves
    begin = method(case.x, case.scale, case.zero_point).detach()
    inside = (begin > (spec.qmin - z) * s + 1e-4) & (begin < (spec.qmax - z) * s - 1e-4)
    torch.testing.assert_close(begin[inside], case.x.detach()[inside], rtol=0, atol=float(case.scale.max()) * 2e-3)
    with torch.no_grad():
        method.rounding += torch.randn(SHAPE)
    h = (torch.sigmoid(method.rounding.detach()) * 1.2 - 0.1).clamp(0, 1)

    def reference(x, rounding):
        h = torch.clamp(torch.sigmoid(rounding) * 1.2 - 0.1, 0, 1)
        q = torch.clamp(ste(torch.floor(x / s), x / s) + z + h, spec.qmin, spec.qmax)
        return (q - z) * s

    y, grads = case.ours(method)
    x, v = (t.detach().clone().requires_grad_() for t in (case.x, method.rounding))
    expected = reference(x, v)
    expected.backward(case.g)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads["rounding"], v.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grads["x"], x.grad, rtol=1e-4, atol=1e-5)
    for beta in (2.0, 20.0):
        torch.testing.assert_close(method.regularizer(beta), (1 - (2 * h - 1).abs() ** beta).sum())
    # hard: by the sign of V, the same in integers, without gradients, and hardened
    q = torch.clamp(torch.floor(case.x.detach() / s) + (method.rounding.detach() >= 0) + z, spec.qmin, spec.qmax)
    assert torch.equal(method.integers(case.x, case.scale, case.zero_point).int(), q.int())
    with torch.no_grad():
        torch.testing.assert_close(method(case.x, case.scale, case.zero_point), (q - z) * s, rtol=1e-6, atol=1e-6)
    method.harden()
    torch.testing.assert_close(method(case.x, case.scale, case.zero_point).detach(), (q - z) * s, rtol=1e-6, atol=1e-6)


def test_adaround_has_the_gradient_that_finite_differences_find():
    spec = QuantSpec.parse("int8")
    method = METHODS.get("AdaRound")(spec)
    x = torch.randn(50, dtype=torch.float64)
    scale, zero = torch.tensor(0.05, dtype=torch.float64), torch.tensor(0, dtype=torch.int32)
    method.init(x, scale, zero)
    method.double()
    v = method.rounding.detach().clone().requires_grad_()

    def soft(v):
        return torch.ops.bitwright.learned_rounding(x, v, scale, zero, -128, 127)

    assert torch.autograd.gradcheck(soft, (v,))
