"""LSQ against the paper's formula."""

import torch
from hypothesis import given

from tests.methods.cases import SHAPE, Case, layouts, on_grid, rounded, seeds, specs, symmetric


@given(specs, seeds, layouts)
def test_lsq(spec, seed, layout):
    case = Case(spec, seed, layout)
    method = case.method("LearnableFakeQuantize")

    def reference(x, scale, zero_point=None):
        s = case.wide(scale)
        z = case.wide(case.zero_point).float() if zero_point is None else rounded(case.wide(zero_point))
        v = x / s + z
        # clamp has gradient 1 on its ends, as the definition wants; z cancels inside, as it must
        return (rounded(torch.clamp(v, spec.qmin, spec.qmax)) - z) * s

    y = case.check(method, reference, case.factor)
    torch.testing.assert_close(y, on_grid(case, method, case.x), rtol=0, atol=0)
    assert ("zero_point" in dict(method.named_parameters())) is not spec.symmetric


@given(symmetric, seeds)
def test_lsq_gradient_of_the_scale_by_the_papers_cases(spec, seed):
    """The cases of equation 3, value by value."""
    case = Case(spec, seed)
    method = case.method("lsq", use_grad_scaling=False)
    _, grads = case.ours(method)
    v = (case.x / case.wide(case.scale)).detach()
    each = torch.where(v < spec.qmin, float(spec.qmin), torch.where(v > spec.qmax, float(spec.qmax), v.round() - v))
    total = torch.zeros_like(case.scale)
    places = case.wide(torch.arange(total.numel()).reshape(total.shape)).expand(SHAPE)
    total.view(-1).index_add_(0, places.reshape(-1), (case.g * each).reshape(-1))
    torch.testing.assert_close(grads["scale"], total, rtol=1e-4, atol=1e-4 * spec.qmax)
