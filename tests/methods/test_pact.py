"""PACT against the paper's formula."""

import torch
from hypothesis import given

from bitwright.methods import METHODS
from bitwright.spec import QuantSpec
from tests.methods.cases import Case, seeds, specs, ste


@given(specs, seeds)
def test_pact(spec, seed):
    case = Case(spec, seed)
    method = case.method("PACTFakeQuantize")
    s, z = method.qparams(case.scale, case.zero_point)

    def reference(x, alpha, n_alpha=None):
        high = case.wide(alpha)
        low = high * (spec.qmin / spec.qmax) if n_alpha is None else -case.wide(n_alpha)
        step, zero = case.wide(s), case.wide(z)
        v = x.detach() / step + zero
        clipped = torch.where(v > spec.qmax, high, torch.where(v < spec.qmin, low, x))
        q = torch.clamp(torch.round(x.detach() / step) + zero, spec.qmin, spec.qmax)
        return ste((q - zero) * step, clipped)

    case.check(method, reference)
    torch.testing.assert_close(s, case.scale, rtol=1e-5, atol=0)
    assert torch.equal(z, case.zero_point)


def test_pact_alpha_is_where_it_clips():
    method = METHODS.get("PACT")(QuantSpec.parse("uint4 symmetric"), alpha=6.0)
    method.start(torch.tensor(0.1), torch.tensor(0, dtype=torch.int32))
    x = torch.tensor([-1.0, 0.0, 3.0, 6.5, 9.0], requires_grad=True)
    y = method(x, torch.tensor(0.1), torch.tensor(0, dtype=torch.int32))
    torch.testing.assert_close(y.detach(), torch.tensor([0.0, 0.0, 3.2, 6.0, 6.0]))
    y.sum().backward()
    assert float(method.alpha.grad) == 2.0
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
