"""Tensors, scales and gradients for the tests of methods, and how results are compared with a formula."""

import math

import torch
from hypothesis import strategies as st

from bitwright.methods import METHODS
from bitwright.numerics.noise import draw_key, noise
from bitwright.numerics.views import broadcast, canonical
from bitwright.spec import QuantSpec

SHAPE = (4, 6, 5)
GRAINS = ["tensor", "channel:0", "channel:1", "channel:-1", "group:3:1", "group:2:0"]
SIGNED = [f"int{b}" for b in (2, 3, 4, 8)]
UNSIGNED = [f"uint{b}" for b in (1, 2, 3, 4, 8)]
symmetric = st.builds(
    lambda f, narrow, g: QuantSpec.parse(f"{f} symmetric {'narrow' if narrow and f[0] == 'i' else ''} {g}"),
    st.sampled_from([*SIGNED, *UNSIGNED, "int16"]),
    st.booleans(),
    st.sampled_from(GRAINS),
)
affine = st.builds(
    lambda f, g: QuantSpec.parse(f"{f} affine {g}"), st.sampled_from([*SIGNED, *UNSIGNED]), st.sampled_from(GRAINS)
)
specs = st.one_of(symmetric, affine)
seeds = st.integers(0, 2**31)
layouts = st.sampled_from(["contiguous", "permuted", "sliced"])


class Case:
    """A tensor, its gradient, and a scale that lets about a tenth of the values saturate."""

    def __init__(self, spec, seed, layout="contiguous"):
        torch.manual_seed(seed)
        self.spec = spec
        x = torch.randn(SHAPE)
        if layout == "permuted":
            x = torch.randn(SHAPE[::-1]).permute(2, 1, 0)
        if layout == "sliced":
            x = torch.randn(8, 6, 5)[::2]
        self.x = x.requires_grad_()
        self.g = torch.randn(SHAPE)
        size = spec.param_shape(SHAPE)
        self.scale = (0.5 + torch.rand(size)) * 3.0 / (spec.qmax - spec.qmin)
        self.zero_point = torch.zeros(size, dtype=torch.int32)
        if not spec.symmetric:
            self.zero_point = torch.randint(spec.qmin, spec.qmax + 1, size, dtype=torch.int32)

    def method(self, name, **options):
        method = METHODS.get(name)(self.spec, **options)
        method.start(self.scale, self.zero_point)
        return method

    def wide(self, param):
        """A parameter expanded to the shape of the values, in the most direct way."""
        grain = self.spec.granularity
        axis = getattr(grain, "axis", None)
        return broadcast(param, self.x, axis, getattr(grain, "size", None))

    @property
    def factor(self):
        return 1 / math.sqrt(self.x.numel() / self.scale.numel() * self.spec.qmax)

    def ours(self, method):
        """What the method gives: values and gradients by name."""
        for p in method.parameters():
            p.grad = None
        self.x.grad = None
        y = method(self.x, self.scale, self.zero_point)
        y.backward(self.g)
        return y.detach(), {"x": self.x.grad, **{n: p.grad for n, p in method.named_parameters()}}

    def check(self, method, reference, factor=1.0, tolerance=1e-4, either=None):
        """Compare with ``reference(x, **params)``, whose gradients autograd finds.

        Values where ``either`` is true lie between two levels to within the last bits of tanh: they may go either way.
        """
        y, grads = self.ours(method)
        inputs = {"x": self.x, **dict(method.named_parameters())}
        free = {n: p.detach().clone().requires_grad_() for n, p in inputs.items()}
        expected = reference(**free)
        certain = torch.ones_like(y, dtype=torch.bool) if either is None else ~either
        torch.testing.assert_close(y[certain], expected.detach()[certain], rtol=1e-6, atol=1e-6)
        assert y.shape == self.x.shape
        expected.backward(self.g)
        for name, p in free.items():
            want = torch.zeros_like(p) if p.grad is None else p.grad
            want = want if name == "x" else want * factor
            torch.testing.assert_close(
                grads[name], want, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        with torch.no_grad():
            plain = method(self.x, self.scale, self.zero_point)
        torch.testing.assert_close(plain, y, rtol=1e-6, atol=1e-6)
        return y


def ste(hard, soft):
    """``hard`` forward, the gradient of ``soft``."""
    return soft + (hard - soft).detach()


def rounded(v):
    return ste(torch.round(v), v)


def on_grid(case, method, x):
    """The grid that the method says it is on gives its values, and its integers."""
    spec = case.spec
    s, z = method.qparams(case.scale, case.zero_point)
    q = torch.clamp(torch.round(x.detach() / case.wide(s)) + case.wide(z), spec.qmin, spec.qmax)
    assert z.dtype == torch.int32
    assert torch.equal(method.integers(x, case.scale, case.zero_point).int(), q.int())
    return (q - case.wide(z)) * case.wide(s)


def noise_of(case):
    """The noise that a method makes next for the values of a case."""
    grain = case.spec.granularity
    at = canonical(case.x.detach(), getattr(grain, "axis", None), getattr(grain, "size", None))
    return at.restore(noise(at.values, draw_key(case.x)))
