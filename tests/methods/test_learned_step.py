"""LSQ as one node: equal to the method's own operator, and kept in memory once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from bitwright.methods import learned_step
from bitwright.quantizer import TensorQuantizer

LSQ = "LearnableFakeQuantize"


def quantizer(spec, x, **options):
    """One that clips a part of ``x``, its zero point (if any) between two integers."""
    made = TensorQuantizer(spec, method=LSQ, method_options=options)
    axis = made.method.axis
    low, high = (torch.zeros(() if axis is None else x.shape[axis]) + end for end in (-0.9, 1.4))
    made.set_range(low, high)
    made.quantize()
    with torch.no_grad():
        if "zero_point" in made.method._parameters:
            made.method.zero_point += 0.3
        made.method.scale.view(-1)[0] *= -1  # its size counts
    return made


def run(function, x, grad, parameters):
    given_x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(given_x)
    return [y.detach(), *torch.autograd.grad(y, [given_x, *parameters], grad)]


def same(found, wanted):
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    for one, other in zip(found[2:], wanted[2:], strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-6)


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(["int4 narrow", "uint4 affine", "int2", "int8 affine", "uint3"]),
    axis=st.sampled_from([None, 0, 1, -1]),
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    layout=st.sampled_from(["plain", "permuted", "sliced"]),
    grad_layout=st.sampled_from(["plain", "expanded"]),
    scaling=st.booleans(),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("large", [1, 1 << 16], ids=["kernel", "operators"])
def test_values_and_gradients_are_those_of_the_method(
    large, spec, axis, shape, layout, grad_layout, scaling, seed, monkeypatch_module
):
    monkeypatch_module.setattr(learned_step, "LARGE", large)
    torch.manual_seed(seed)
    x = torch.randn(shape)
    if layout == "permuted":
        x = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    elif layout == "sliced":
        x = torch.randn([*shape[:-1], 2 * shape[-1]])[..., ::2]
    grad = torch.randn(shape) if grad_layout == "plain" else torch.randn(()).expand(shape)
    made = quantizer(spec if axis is None else f"{spec} channel:{axis}", x, use_grad_scaling=scaling)
    parameters = list(made.parameters())
    wanted = run(lambda t: made.method(t, made.scale, made.zero_point), x, grad, parameters)
    assert learned_step.learned_step(made.method, x) is not None
    same(run(made, x, grad, parameters), wanted)


@pytest.fixture(scope="module")
def monkeypatch_module():
    patch = pytest.MonkeyPatch()
    yield patch
    patch.undo()


@pytest.mark.parametrize("spec", ["int4 narrow channel:1", "uint4 affine", "int4 affine channel:0"])
def test_compiled_kernels_agree(spec, monkeypatch):
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    torch.manual_seed(0)
    x, grad = torch.randn(8, 16, 40, 40), torch.randn(8, 16, 40, 40)
    made = quantizer(spec, x)
    parameters = list(made.parameters())
    found = run(made, x, grad, parameters)
    monkeypatch.setattr(learned_step, "LARGE", 1 << 30)
    same(run(made, x, grad, parameters), found)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), axis=st.sampled_from([0, 1]), large=st.sampled_from([1, 1 << 16]))
def test_a_divisor_quantizes_the_product_and_divides(seed, axis, large, monkeypatch_module):
    monkeypatch_module.setattr(learned_step, "LARGE", large)
    torch.manual_seed(seed)
    x, grad = torch.randn(5, 6, 3), torch.randn(5, 6, 3)
    made = quantizer(f"int4 narrow channel:{axis}", x)
    divisor = torch.randn(x.shape[axis]).mul(2).requires_grad_()
    shape = [-1 if d == axis else 1 for d in range(3)]

    def plain(t):
        c = divisor.reshape(shape)
        return made.method(t * c, made.scale, made.zero_point) / c

    def fast(t):
        return learned_step.learned_step(made.method, t, divisor)

    wanted = run(plain, x, grad, [made.method.scale, divisor])
    found = run(fast, x, grad, [made.method.scale, divisor])
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-6)


@pytest.mark.parametrize(
    ("spec", "method", "change"),
    [
        ("int4", "LSQPlusFakeQuantize", None),
        ("int4 group:2:0", LSQ, None),
        ("int4", LSQ, torch.bfloat16),
        ("int4", LSQ, torch.float64),
    ],
)
def test_all_else_is_left_to_the_method(spec, method, change):
    x = torch.randn(4, 6)
    made = TensorQuantizer(spec, method=method)
    made.observe()
    made(x)
    made.compute_qparams()
    made.quantize()
    x = x if change is None else x.to(change)
    assert learned_step.learned_step(made.method, x) is None
    assert torch.equal(made(x), made.method(x, made.scale, made.zero_point))


def test_without_gradients_and_in_torch_compile_it_is_the_operator():
    x = torch.randn(4, 6)
    made = quantizer("int4", x)
    with torch.no_grad():
        assert learned_step.learned_step(made.method, x) is None
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(made, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), made(x))
    assert any("clipped_quantize" in str(n.target) for n in graphs[0].graph.nodes)


# ------------------------------------------------------------------------------------------------ memory


def test_a_quantized_tensor_is_made_again_and_not_kept():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 16, 40, 40, requires_grad=True), torch.randn(8, 16, 3, 3, requires_grad=True)
    made = quantizer("uint4 affine", x)
    packed = []
    keep = learned_step._pack

    def spy(tensor):
        packed.append((tuple(tensor.shape), keep(tensor) is tensor))
        return keep(tensor)

    gradients = []
    for context in (
        torch.autograd.graph.saved_tensors_hooks(spy, learned_step._unpack),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        y = made(x)
        with context:
            out = F.conv2d(y, weight)
        gradients.append(torch.autograd.grad(out.square().sum(), [x, weight, *made.parameters()]))
    assert packed == [((4, 16, 40, 40), False), ((8, 16, 3, 3), True)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_within_a_checkpoint_gradients_are_the_same():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 16, 40, 40, requires_grad=True), torch.randn(8, 16, 3, 3, requires_grad=True)
    made = quantizer("uint4 affine", x)

    def block(t):
        y = made(torch.relu(t))
        with learned_step.recompute_quantized():
            return F.conv2d(y, weight)

    wanted_of = [x, weight, *made.parameters()]
    plain = torch.autograd.grad(block(x).square().sum(), wanted_of)
    again = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).square().sum(), wanted_of)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_copy_learns_on_its_own():
    x = torch.randn(4, 6)
    made = quantizer("int4", x)
    twin = copy.deepcopy(made)
    made(x).sum().backward()
    assert made.method.scale.grad is not None
    assert twin.method.scale.grad is None
