"""APoT against a search of all levels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.methods import METHODS
from bitwright.methods.apot import additive_powers
from bitwright.spec import QuantSpec
from tests.methods.cases import (
    GRAINS,
    SIGNED,
    UNSIGNED,
    Case,
    seeds,
    ste,
)


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
