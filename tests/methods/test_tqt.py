"""TQT against the paper's formula."""

import math

import torch
from hypothesis import given

from tests.methods.cases import Case, on_grid, rounded, seeds, ste, symmetric


@given(symmetric, seeds)
def test_tqt(spec, seed):
    case = Case(spec, seed)
    method = case.method("TqtFakeQuantize")
    side = spec.bits - spec.format.signed

    def reference(x, log2_threshold):
        t = case.wide(log2_threshold)
        s = 2.0 ** (ste(torch.ceil(t), t) - side)
        v = x / s
        return rounded(torch.clamp(v, spec.qmin, spec.qmax)) * s

    s, _ = method.qparams(case.scale, case.zero_point)
    plain = case.method("TqtFakeQuantize", use_grad_scaling=False)
    y = case.check(plain, reference)
    (same, scaled), (_, grads) = case.ours(method), case.ours(plain)
    assert torch.equal(same, y)
    wanted = grads["log2_threshold"] * case.factor / (s * math.log(2)).square()  # moves s as LSQ does
    torch.testing.assert_close(scaled["log2_threshold"], wanted.clamp(-1, 1), rtol=1e-4, atol=0)
    torch.testing.assert_close(y, on_grid(case, method, case.x), rtol=0, atol=0)
    mantissa, _ = torch.frexp(s)
    assert (mantissa == 0.5).all()
    assert (s >= case.scale * 0.7071).all()
    assert (s <= case.scale * 1.4143).all()
    assert (method.log2_threshold % 1 == 0.5).all()  # as far from the next scale as from the one before
