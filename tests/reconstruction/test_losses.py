"""The losses of reconstruction, against written-out formulas and finite differences."""

import pytest
import torch

from bitwright.reconstruction.losses import distance, prediction_gap
from bitwright.reconstruction.settings import Settings


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_distance():
    result, target, weight = numbers(4, 3, 2).requires_grad_(), numbers(4, 3, 2), numbers(3, 2).square()
    (plain,), (weighted,) = distance([result], [target], [None]), distance([result], [target], [weight])
    assert float(plain) == pytest.approx(float((result - target).square().mean()))
    assert float(weighted) == pytest.approx(float((weight * (result - target) ** 2).mean()))
    assert torch.autograd.gradcheck(lambda r: distance([r], [target], [weight])[0], result)


def test_prediction_gap():
    logits, target, image = numbers(4, 5).requires_grad_(), numbers(4, 5), numbers(4, 2, 3).requires_grad_()
    p, q = target.softmax(1), logits.softmax(1)
    assert float(prediction_gap([logits], [target])) == pytest.approx(float((p * (p / q).log()).sum() / 4))
    assert float(prediction_gap([target], [target])) == pytest.approx(0.0, abs=1e-12)
    wanted = numbers(4, 2, 3)
    assert torch.autograd.gradcheck(lambda a, b: prediction_gap([a, b], [target, wanted]), (logits, image))


def test_beta_falls_after_the_warm_up_and_the_pressure_grows():
    settings = Settings(warmup=0.2, beta=(20.0, 2.0))
    assert settings.beta_at(19, 100) is None
    assert [settings.beta_at(step, 100) for step in (20, 60, 100)] == [20.0, 11.0, 2.0]
    assert [settings.pressure(step, 100) for step in (0, 50, 100)] == pytest.approx([1 / 30, 1.0, 30.0])


def test_activations_are_dropped_where_they_are_coarse():
    assert [Settings().keep_at(bits) for bits in (2, 4, 7, 8, 16)] == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert Settings(keep=0.25).keep_at(8) == 0.25
    assert Settings(method="brecq", keep=0.25).keep_at(4) == 1.0
