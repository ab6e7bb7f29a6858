"""Roundings: the soft weights and the gradients of V, against the method's own kernel and autograd."""

import pytest
import torch

import bitwright as bw
from bitwright.reconstruction.learned import LearnedWeight
from bitwright.reconstruction.roundings import roundings_of

SPECS = [
    "int4 symmetric narrow channel:0",
    "uint3 affine tensor",
    "int3 symmetric group:4:1",
    "int2 symmetric channel:0",
]


def begun(spec, shape=(6, 8), dtype=torch.float32):
    """A weight that has begun to learn, with V all over the place and values beyond both ends of the grid."""
    weight = torch.randn(shape).to(dtype)
    quantizer = bw.TensorQuantizer(spec, observer="MSEObserver")
    quantizer.observer(weight)
    quantizer.compute_qparams()
    quantizer.set_qparams(quantizer.qparams()[0] * 0.8, quantizer.qparams()[1])
    learned = LearnedWeight(spec, quantizer, weight, torch.nn.Identity())
    learned.begin()
    learned.method.learn("rounding", torch.randn(shape) * 3)  # some are decided
    return learned


@pytest.mark.parametrize("spec", SPECS)
def test_soft_weights_are_those_of_the_method(spec):
    torch.manual_seed(0)
    learned = begun(spec)
    params = learned.quantizer.qparams()
    wanted = learned.method(learned.weight, *params).detach()
    (roundings,) = roundings_of([learned])
    (soft,) = roundings.soften()
    torch.testing.assert_close(soft.detach(), wanted, rtol=1e-5, atol=1e-6)
    assert learned.method(learned.weight, *params) is soft
    roundings.finish()
    assert learned.method.soft is None


@pytest.mark.parametrize("beta", [None, 20.0, 5.0, 2.0, 1.5])
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_those_of_the_loss_and_the_regularizer(spec, beta):
    torch.manual_seed(0)
    several = [begun(spec), begun(spec, (3, 8))]
    asked = [torch.randn_like(w.weight) for w in several]
    loss = sum(((w.method(w.weight, *w.quantizer.qparams()) * a).sum() for w, a in zip(several, asked, strict=True)))
    if beta is not None:
        loss = loss + sum(0.3 * w.method.regularizer(beta) for w in several)
    wanted = torch.autograd.grad(loss, [w.rounding for w in several])
    (roundings,) = roundings_of(several)
    soft = roundings.soften()
    assert [s.shape for s in soft] == [w.weight.shape for w in several]
    roundings.pull(asked, beta, 0.3)
    flat = torch.cat([g.reshape(-1) for g in wanted])
    torch.testing.assert_close(roundings.rounding.grad, flat, rtol=1e-4, atol=1e-5)


def test_v_goes_back_to_each_weight_once_decided():
    torch.manual_seed(0)
    several = [begun(SPECS[0]), begun(SPECS[1], (3, 8), torch.bfloat16)]
    (roundings,) = roundings_of(several)
    assert [s.dtype for s in roundings.soften()] == [torch.float32, torch.bfloat16]
    assert not roundings.decided()
    with torch.no_grad():
        roundings.rounding.copy_(torch.where(torch.randn(72) > 0, 5.0, -5.0))
    roundings.soften()
    assert roundings.decided()
    roundings.finish()
    assert torch.equal(torch.cat([w.rounding.reshape(-1) for w in several]), roundings.rounding.detach())


@pytest.mark.parametrize("stretch", [None, 1.25])
def test_a_weight_that_is_held_is_the_hardened_one(stretch):
    torch.manual_seed(0)
    learned = begun(SPECS[0])
    learned.harden()
    if stretch is not None:
        learned.stretch_by(torch.full_like(learned.quantizer.qparams()[0], stretch))
    with torch.no_grad():
        wanted = learned.quantizer.fake_quantize(learned.weight)
    learned.hold()
    assert torch.equal(learned.quantizer.fake_quantize(learned.weight), wanted)
    learned.let_go()
    assert learned.method.soft is None
