"""The noise that kernels make: uniform, independent, and repeatable."""

import pytest
import torch

from bitwright.numerics.noise import draw_key, noise


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
    for block in (16, 256, 4096):  # means of rows and columns spread like those of independent numbers
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
