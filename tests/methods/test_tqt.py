"""TQT against the paper's formula."""

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

    y = case.check(method, reference)
    torch.testing.assert_close(y, on_grid(case, method, case.x), rtol=0, atol=0)
    s, _ = method.qparams(case.scale, case.zero_point)
    mantissa, _ = torch.frexp(s)
    assert (mantissa == 0.5).all()
    assert (s >= case.scale * 0.9999).all()
    assert (s < case.scale * 2.0001).all()
