"""Values and gradients of every method against the paper's formula, written out plainly here."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.methods import METHODS
from bitwright.methods.apot import additive_powers
from bitwright.numerics.hyperbolic import tanh_and_slope
from bitwright.numerics.noise import draw_key, noise
from bitwright.numerics.operator import Arranged
from bitwright.numerics.views import broadcast
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
        """A parameter against the values, expanded in the plain way."""
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


# ------------------------------------------------------------------------------------------------ LSQ and LSQ+


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


# ------------------------------------------------------------------------------------------------------- PACT


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


# -------------------------------------------------------------------------------------------------------- TQT


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


# -------------------------------------------------------------------------------------------------------- DSQ


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


# ----------------------------------------------------------------------------------------------------- DoReFa


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


# ------------------------------------------------------------------------------------------- APoT and NNIE


def test_additive_powers():
    def scaled(bits):
        levels = additive_powers(bits)
        return (levels / levels[-1]).tolist()

    assert scaled(1) == [0, 1]
    assert scaled(2) == [0, 0.25, 0.5, 1]
    three = sorted(a + b for a in (0, 1 / 2, 1 / 4, 1 / 16) for b in (0, 1 / 8))
    assert scaled(3) == pytest.approx([v / three[-1] for v in three])
    four = sorted(a + b for a, b in itertools.product((0, 1 / 2, 1 / 8, 1 / 32), (0, 1 / 4, 1 / 16, 1 / 64)))
    assert scaled(4) == pytest.approx([v / four[-1] for v in four])
    for bits in range(1, 9):
        levels = additive_powers(bits)
        assert len(levels.unique()) == 2**bits
        assert (levels[1:] > levels[:-1]).all()
        assert torch.equal(levels, levels.round())


@given(st.sampled_from([*SIGNED, *UNSIGNED, "int5", "int6", "int7", "uint7"]), st.sampled_from(GRAINS), seeds)
def test_apot(form, grain, seed):
    spec = QuantSpec.parse(f"{form} symmetric {grain}")
    case = Case(spec, seed)
    method = case.method("APoTFakeQuantize")
    magnitudes = additive_powers(spec.bits - spec.format.signed)
    magnitudes = (magnitudes / magnitudes[-1]).float()
    levels = torch.cat([-magnitudes.flip(0), magnitudes]).unique() if spec.format.signed else magnitudes

    def reference(x, alpha):
        a = case.wide(alpha)
        v = torch.clamp(x / a, float(levels[0]), 1.0)
        nearest = levels[(v.detach()[..., None] - levels).abs().argmin(-1)]
        return ste(nearest, v) * a

    case.check(method, reference)
    torch.testing.assert_close(method.alpha.detach(), case.scale * spec.qmax)
    assert not method.uniform


def test_apot_normalises_weights():
    spec = QuantSpec.parse("int4")
    method = METHODS.get("apot")(spec, weight_norm=True)
    scale, zero = torch.tensor(0.1), torch.tensor(0, dtype=torch.int32)
    method.start(scale, zero)
    assert method.alpha.item() == 3.0
    x = torch.randn(1000) * 0.01 + 5
    plain = METHODS.get("apot")(spec)
    plain.start(torch.tensor(3.0 / 7), zero)
    expected = plain((x - x.mean()) / (x.std() + 1e-5), scale, zero)
    torch.testing.assert_close(method(x, scale, zero), expected)


@given(st.sampled_from(["int8", "int4", "int3", "int2", "uint8", "uint4"]), st.sampled_from(GRAINS), seeds)
def test_nnie(form, grain, seed):
    spec = QuantSpec.parse(f"{form} symmetric {grain}")
    case = Case(spec, seed)
    method = case.method("NNIEFakeQuantize")
    rate, m = (spec.qmax + 1) / 8, spec.qmax
    c = case.wide(case.scale * spec.qmax).double()
    z = torch.round(rate * torch.log2(c)) - m
    x = case.x.detach().double()
    lowest = torch.where(x < 0, 1.0, 0.0)
    code = (torch.round(rate * torch.log2(x.abs())) - z).clamp(max=m)
    expected = torch.sign(x) * 2 ** ((torch.maximum(code, lowest) + z) / rate)
    expected[x.abs() <= 2 ** ((lowest + z) / rate) / 2] = 0
    if not spec.format.signed:
        expected = expected.clamp(min=0)
    y, grads = case.ours(method)
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-7)
    assert torch.equal(grads["x"], case.g)


# --------------------------------------------------------------------------------------------------- AdaRound


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


# ----------------------------------------------------------------------------------- QDrop and stochastic


def noise_of(case):
    """The noise that a method makes next for the values of a case."""
    grain = case.spec.granularity
    at = Arranged.of(case.x.detach(), getattr(grain, "axis", None), getattr(grain, "size", None))
    return at.view.restore(noise(at.view.values, draw_key(case.x)))


def test_noise_is_fair():
    torch.manual_seed(0)
    n = 1 << 20
    key = draw_key(torch.empty(0))
    u = noise(torch.empty(n), key)
    assert u.dtype == torch.float32
    assert -0.5 < float(u.min()) < -0.499
    assert 0.499 < float(u.max()) < 0.5
    u = u.double()
    assert abs(float(u.mean())) < 4 * (12 * n) ** -0.5
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.01)
    counts = torch.histc(u, 256, -0.5, 0.5)
    deviation = float(((counts - n / 256) ** 2 / (n / 256)).sum())
    assert abs(deviation - 255) < 4 * 510**0.5
    for lag in (1, 2, 8, 56, 64, 512, 4608, 65536):
        assert abs(float((u[lag:] * u[:-lag]).mean())) * 12 * n**0.5 < 4.5, lag
    for block in (16, 256, 4096):  # means of rows and of columns spread as those of independent numbers
        for table in (u.view(-1, block), u.view(block, -1).T):
            assert float(table.mean(1).var()) * 12 * block == pytest.approx(1, abs=5 * (2 * block / n) ** 0.5)
    for other in (draw_key(torch.empty(0)), key + torch.tensor([0, 1], dtype=torch.int32)):
        assert abs(float((u * noise(torch.empty(n), other)).mean())) * 12 * n**0.5 < 4.5


def test_noise_follows_the_seed():
    def draw():
        return noise(torch.empty(100), draw_key(torch.empty(0)))

    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_qdrop_quantizes_with_its_probability(prob):
    method = METHODS.get("qdrop")(QuantSpec.parse("int4"), prob=prob)
    x = torch.randn(100_000)
    y = method(x, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))
    assert float((y != x).float().mean()) == pytest.approx(prob, abs=0.0 if prob in (0, 1) else 0.01)


def test_stochastic_rounding_leaves_whole_numbers_of_steps():
    method = METHODS.get("stochastic")(QuantSpec.parse("int8"))
    x = torch.arange(-128.0, 128.0).repeat(2000)
    assert torch.equal(method(x, torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)), x)


@given(specs, seeds)
@settings(max_examples=30)
def test_qdrop(spec, seed):
    case = Case(spec, seed)
    method = case.method("QDropFakeQuantize", prob=0.5)
    plain = case.method("lsq", use_grad_scaling=False, learn_zero_point=False)
    torch.manual_seed(1)
    y, grads = case.ours(method)
    torch.manual_seed(1)
    some = noise_of(case) < 0
    g, case.g = case.g, case.g * some
    quantized, expected = case.ours(plain)
    assert torch.equal(y, torch.where(some, quantized, case.x.detach()))
    torch.testing.assert_close(grads["x"], expected["x"] + g * ~some)
    torch.testing.assert_close(grads["scale"], expected["scale"])
    case.g = g
    method.eval()
    everything = case.ours(method)
    assert torch.equal(everything[0], quantized)


@given(specs, seeds)
@settings(max_examples=30)
def test_stochastic(spec, seed):
    case = Case(spec, seed)
    method = case.method("StochasticFakeQuantize")
    s, z = case.wide(case.scale), case.wide(case.zero_point)
    torch.manual_seed(1)
    y, grads = case.ours(method)
    torch.manual_seed(1)
    v = case.x.detach() / s
    up = noise_of(case) + 0.5 < v - torch.floor(v)
    q = torch.clamp(torch.floor(v) + up + z, spec.qmin, spec.qmax)
    assert torch.equal(y, (q - z) * s)
    v = torch.round(case.x.detach() / s) + z
    assert torch.equal(grads["x"], case.g * ((v >= spec.qmin) & (v <= spec.qmax)))
    method.eval()
    assert torch.equal(method(case.x, case.scale, case.zero_point).detach(), on_grid(case, method, case.x))


def test_stochastic_rounding_keeps_the_mean():
    method = METHODS.get("stochastic")(QuantSpec.parse("int8"))
    x = torch.full((20000,), 0.3)
    y = method(x, torch.tensor(1.0), torch.tensor(0, dtype=torch.int32))
    assert y.unique().tolist() == [0.0, 1.0]
    assert float(y.mean()) == pytest.approx(0.3, abs=0.02)
