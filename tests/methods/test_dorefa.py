"""DoReFa against the paper's formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.methods import METHODS
from bitwright.spec import QuantSpec
from tests.methods.cases import UNSIGNED, Case, affine, layouts, rounded, seeds, symmetric


def squeezed(case, x):
    t = torch.tanh(x)
    grain = str(case.spec.granularity)
    if grain == "tensor":
        return t / t.abs().max()
    axis = case.spec.granularity.axis % 3
    if grain.startswith("channel"):
        return t / t.abs().amax([d for d in range(3) if d != axis], keepdim=True)
    size = case.spec.granularity.size
    folded = t.abs().unflatten(axis, (-1, size)).amax(axis + 1)
    return t / folded.repeat_interleave(size, axis)


def undecided(case, rate, offset):
    """Where rounding depends on the last bits of tanh."""
    v = squeezed(case, case.x.detach().double()) * rate + offset
    return (v - torch.floor(v) - 0.5).abs() < 2e-6 * rate


@given(st.one_of(symmetric, affine), seeds, layouts)
def test_dorefa_weights(spec, seed, layout):
    case = Case(spec, seed, layout)
    method = case.method("DoReFaFakeQuantize", role="weight")
    n = 2**spec.bits - 1

    def reference(x):
        return 2 * rounded(n * (squeezed(case, x) / 2 + 0.5)) / n - 1

    y = case.check(method, reference, tolerance=1e-3, either=undecided(case, n / 2, n / 2))
    assert float(y.abs().max()) == pytest.approx(1.0)
    assert not method.uniform


@given(symmetric, seeds)
def test_dorefa_weights_of_the_earlier_toolkits(spec, seed):
    if not spec.format.signed:
        return
    case = Case(spec, seed)
    method = case.method("dorefa", normalize=True)
    s = 1 / spec.qmax

    def reference(x):
        return rounded((squeezed(case, x) / s).clamp(spec.qmin, spec.qmax)) * s

    y = case.check(method, reference, tolerance=1e-3, either=undecided(case, spec.qmax, 0))
    assert method.uniform
    scale, _ = method.qparams(case.scale, case.zero_point)
    integers = method.integers(case.x, case.scale, case.zero_point)
    torch.testing.assert_close(integers * case.wide(scale), y)


def test_dorefa_squeezing_has_the_gradient_that_finite_differences_find():
    case = Case(QuantSpec.parse("int16 channel:0"), 0)
    x = case.x.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: squeezed(case, x), (x,))
    method = METHODS.get("dorefa")(case.spec)
    g = case.g.double()
    (ours,) = torch.autograd.grad(method(x, case.scale, case.zero_point), x, g)
    step = 1e-6
    largest = (2, *(x[2].abs() == x[2].abs().max()).nonzero()[0].tolist())
    for place in [(0, 0, 0), (1, 2, 3), largest]:
        moved = torch.zeros_like(x)
        moved[place] = step
        slope = ((squeezed(case, x + moved) - squeezed(case, x - moved)) * g).sum() / (2 * step)
        assert float(ours[place]) == pytest.approx(slope.item(), rel=1e-4, abs=1e-6)


@given(st.sampled_from(UNSIGNED), seeds)
def test_dorefa_activations(form, seed):
    case = Case(QuantSpec.parse(f"{form} symmetric"), seed)
    method = case.method("DoReFa")
    n = 2**case.spec.bits - 1
    y, grads = case.ours(method)
    torch.testing.assert_close(y, torch.round(case.x.detach().clamp(0, 1) * n) / n, rtol=0, atol=1e-6)
    v = torch.round(case.x.detach() * n)
    torch.testing.assert_close(grads["x"], case.g * ((v >= 0) & (v <= n)), rtol=0, atol=1e-6)
