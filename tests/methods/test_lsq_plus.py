"""LSQ+ against the paper's formula."""

import torch
from hypothesis import given

from tests.methods.cases import Case, on_grid, rounded, seeds, specs, ste


@given(specs, seeds)
def test_lsq_plus(spec, seed):
    case = Case(spec, seed)
    method = case.method("lsq+")

    def reference(x, scale, offset=None):
        s = case.wide(scale)
        beta = torch.zeros_like(s) if offset is None else case.wide(offset)
        whole = -torch.round(-beta / s).clamp(spec.qmin, spec.qmax) * s  # a whole number of steps, as stored
        b = ste(whole, beta)
        v = (x - b) / s
        return rounded(torch.clamp(v, spec.qmin, spec.qmax)) * s + b

    # x - b rounds differently from x / s + z next to ties; move such values away
    with torch.no_grad():
        v = case.x / case.wide(case.scale)
        case.x[((v - v.floor()) - 0.5).abs() < 1e-3] += 0.1 * float(case.scale.min())
        edge = v + case.wide(case.zero_point)
        near = ((edge - spec.qmin).abs() < 1e-3) | ((edge - spec.qmax).abs() < 1e-3)
        case.x[near] += 0.1 * float(case.scale.min())
    case.check(method, reference, case.factor, tolerance=1e-3)
    on_grid(case, method, case.x)
