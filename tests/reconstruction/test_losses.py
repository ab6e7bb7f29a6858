"""The losses of reconstruction, against written-out formulas and finite differences."""

import pytest
import torch

from bitwright.methods.adaround import fraction
from bitwright.reconstruction.learned import learnable_weights
from bitwright.reconstruction.losses import distance, prediction_gap, undecided
from bitwright.reconstruction.settings import Settings
from tests.reconstruction.nets import calibrated


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


@pytest.mark.parametrize("beta", [20.0, 5.0, 2.0])
def test_undecided(beta):
    model, _ = calibrated("residual")
    found = [w for node in model.graph.nodes for w in learnable_weights(model, node)][:2]
    for weight in found:
        weight.begin()
    total = undecided(found, beta)
    expected = sum(float((1 - (2 * fraction(w.rounding) - 1).abs() ** beta).sum()) for w in found)
    assert float(total) == pytest.approx(expected, rel=1e-5)
    (grad,) = torch.autograd.grad(total, found[0].rounding)
    with torch.no_grad():
        for place in range(0, 40, 8):
            values = []
            for step in (1e-2, -1e-2):
                found[0].rounding.view(-1)[place] += step
                values.append(float(found[0].method.regularizer(beta).double()))
                found[0].rounding.view(-1)[place] -= step
            assert (values[0] - values[1]) / 2e-2 == pytest.approx(float(grad.view(-1)[place]), rel=0.1, abs=5e-3)


def test_beta_falls_after_the_warm_up_and_the_pressure_grows():
    settings = Settings(warmup=0.2, beta=(20.0, 2.0))
    assert settings.beta_at(19, 100) is None
    assert [settings.beta_at(step, 100) for step in (20, 60, 100)] == [20.0, 11.0, 2.0]
    assert [settings.pressure(step, 100) for step in (0, 50, 100)] == pytest.approx([1 / 30, 1.0, 30.0])
