"""Searching observers against exhaustive references written out from their definitions, value by value."""

import math

import numpy as np
import pytest
import torch

from bitwright.errors import ConfigError
from bitwright.numerics import scale_and_zero_point
from bitwright.observers import OBSERVERS
from bitwright.observers.aciq import ACIQObserver, best_clip, laplace_scale
from bitwright.observers.ema_mse import EMAMSEObserver
from bitwright.observers.kl import KLObserver
from bitwright.observers.minmax_floor import MinMaxFloorObserver
from bitwright.observers.mse import MSEObserver
from bitwright.observers.pot_mode import PoTModeObserver
from bitwright.spec import QuantSpec

COUNT = 20_000


def draw(kind, seed=0, count=COUNT):
    """Data of the kinds that calibrations meet."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=g)
    uniform = torch.rand(count, generator=g)
    if kind == "laplace":
        return -torch.log(1 - uniform * 0.999999) * normal.sign()
    if kind == "bimodal":
        return normal * 0.3 + torch.where(uniform < 0.4, -2.0, 3.0)
    if kind == "outlier":
        normal[count // 2] = 60.0
    shifted = {"uniform": uniform * 3 - 1, "relu": normal.relu(), "relu6": (normal * 4).clamp(0, 6)}
    return shifted.get(kind, normal)


KINDS = ["normal", "laplace", "uniform", "bimodal", "outlier", "relu", "relu6"]


def mean_error(x, lo, hi, spec, p=2.0):
    """Mean |x - x_q|**p in float64, the plain way; lo and hi may be vectors of candidates."""
    scale, zero = (v.double().reshape(-1, 1) for v in scale_and_zero_point(lo, hi, spec))
    x = x.double().reshape(1, -1)
    back = ((x / scale).round().add(zero).clamp(spec.qmin, spec.qmax) - zero) * scale
    return (x - back).abs().pow(p).mean(1)


def exhaustive(x, spec, p=2.0):
    """The least error of all ranges: one end in 200 steps for symmetric specs, both in steps for affine ones."""
    lo, hi = x.min().clamp(max=0).double(), x.max().clamp(min=0).double()
    if spec.symmetric:
        shrink = torch.linspace(0.02, 1, 200, dtype=torch.float64)
        return min(float(mean_error(x, lo * part, hi * part, spec, p).min()) for part in shrink.split(10))
    least = math.inf
    grid = torch.cat([torch.linspace(0.02, 0.2, 10), torch.linspace(0.22, 1, 40)]).double()
    for part in grid if lo < 0 else grid[-1:]:
        least = min(least, *(float(mean_error(x, lo * part, hi * g, spec, p).min()) for g in grid.split(10)))
    return least


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["int8", "int4 narrow", "int2", "uint8 symmetric", "int3 pot"])
def test_mse_is_within_a_percent_of_the_exhaustive_optimum(kind, spec):
    spec, x = QuantSpec.parse(spec), draw(kind)
    observer = MSEObserver(spec)
    for batch in x.split([100, 9_900, 10_000]):
        observer(batch)
    assert observer.histogram.exact() is None
    assert float(mean_error(x, *observer.range(), spec)) <= 1.01 * exhaustive(x, spec)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["uint4", "int8 affine"])
def test_affine_mse_is_within_a_percent_of_the_best_pair_of_ends(kind, spec):
    spec, x = QuantSpec.parse(spec), draw(kind, count=6_000)
    observer = MSEObserver(spec)
    observer(x)
    assert float(mean_error(x, *observer.range(), spec)) <= 1.01 * exhaustive(x, spec)


@pytest.mark.parametrize("p", [1.0, 2.4, 3.5])
def test_any_power_of_the_error(p):
    spec, x = QuantSpec.parse("int4"), draw("laplace", count=10_000)
    for cls in (MSEObserver, EMAMSEObserver):
        observer = cls(spec, p=p)
        observer(x)
        assert float(mean_error(x, *observer.range(), spec, p)) <= 1.01 * exhaustive(x, spec, p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["int4", "int8", "uint4"])
def test_few_values_are_searched_as_they_are(kind, spec):
    spec = QuantSpec.parse(spec + " channel:0")
    x = draw(kind, count=6 * 500).reshape(6, 500)
    observer = MSEObserver(spec)
    observer(x)
    assert observer.histogram.exact() is not None
    for row, low, high in zip(x, *observer.range(), strict=True):
        shrink = torch.linspace(0.2, 1.0, 81, dtype=torch.float64)
        least = mean_error(row, shrink * float(row.min().clamp(max=0)), shrink * float(row.max().clamp(min=0)), spec)
        assert float(mean_error(row, low, high, spec)) <= float(least.min()) * 1.01


def naive_divergence(counts, held, levels):
    """KL(P || Q) bin by bin, as the entropy calibration is written down."""
    counts = counts.astype(np.float64)
    reference = counts[:held].copy()
    reference[-1] += counts[held:].sum()
    candidate = np.zeros(held)
    for level in range(levels):
        start, stop = (int((m * held + levels // 2) // levels) for m in (level, level + 1))
        filled = [j for j in range(start, stop) if reference[j] > 0]
        for j in filled:
            candidate[j] = max(counts[start:stop].sum(), 0.5) / len(filled)
    if counts[:held].sum() < counts.sum() / 2:
        return math.inf
    reference, candidate = reference / reference.sum(), candidate / counts[:held].sum()
    used = reference > 0
    return float((reference[used] * np.log(reference[used] / candidate[used])).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("spec", "levels"), [("int8", 128), ("int4", 8), ("uint8", None)])
def test_kl_is_within_a_percent_of_the_exhaustive_optimum(kind, spec, levels):
    spec, x = QuantSpec.parse(spec), draw(kind)
    observer = KLObserver(spec, bins=1024)
    for batch in x.split(7_000):
        observer(batch)
    levels = levels or (256 if x.min() >= 0 else 128)
    width = 2.0 ** (math.floor(math.log2(x.abs().max())) + 1) / 512
    counts = np.bincount((x.abs().double() / width).long().clamp(max=511).numpy(), minlength=512)
    counts[0] = min(counts[0], counts[1])
    used = int(float(x.abs().max()) / width) + 1
    costs = {i: naive_divergence(counts, i, levels) for i in range(max(levels, 32), used + 1)}
    clip = max(-float(observer.range()[0]), float(observer.range()[1]))
    picked = used if clip == float(x.abs().max()) else round(clip / width)
    least = min(costs.values())
    assert costs[picked] <= least + 0.01 * abs(least) + 1e-12


def test_kl_depends_on_its_data_and_leaves_wide_formats_alone():
    shares = []
    for kind in ("normal", "laplace", "uniform", "outlier"):
        observer = KLObserver(QuantSpec.parse("int8"))
        observer(draw(kind))
        shares.append(float(observer.range()[1] / draw(kind).abs().max()))
    assert len({round(s, 3) for s in shares}) == 4
    assert shares[2] > 0.95  # a uniform distribution is not cut
    assert shares[3] < 0.25  # an outlier is
    observer = KLObserver(QuantSpec.parse("int16"))
    observer(draw("normal"))
    assert observer.range()[1] == draw("normal").max()


def expected_error(a, bits, distribution):
    """ACIQ's expected squared error by numerical integration of the clipped tail."""
    t = torch.linspace(float(a), float(a) + 40, 400_001, dtype=torch.float64)
    density = torch.exp(-t) / 2 if distribution == "laplace" else torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    return 2 * float(torch.trapezoid((t - a) ** 2 * density, t)) + a * a / (3 * 4**bits)


@pytest.mark.parametrize("distribution", ["gaus", "laplace"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_aciq_clips_where_the_expected_error_is_least(distribution, bits):
    best = best_clip(distribution, bits)
    here = expected_error(best, bits, distribution)
    assert here < expected_error(best * 1.02, bits, distribution)
    assert here < expected_error(best * 0.98, bits, distribution)


def test_aciq_values_of_the_paper():
    assert [best_clip("laplace", b) for b in (2, 3, 4)] == pytest.approx([2.83, 3.89, 5.03], abs=0.01)
    assert [best_clip("gaus", b) for b in (2, 3, 4)] == pytest.approx([1.71, 2.15, 2.55], abs=0.01)


@pytest.mark.parametrize("distribution", ["gaus", "laplace"])
@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_aciq_range(distribution, shift):
    x = draw("laplace" if distribution == "laplace" else "normal") * 0.5 + shift
    observer = ACIQObserver(QuantSpec.parse("int4 affine"), distribution=distribution)
    for batch in x.split(7_000):
        observer(batch)
    centre = float(x.mean())
    spread = 0.5 if distribution == "laplace" else float(x.std())
    reach = best_clip(distribution, 4) * spread
    assert [float(v) for v in observer.range()] == pytest.approx([centre - reach, centre + reach], rel=0.03, abs=0.05)


def test_aciq_of_one_sided_data_gives_all_levels_to_one_side():
    observer = ACIQObserver(QuantSpec.parse("uint4"))
    observer(draw("relu"))
    assert [float(v) for v in observer.range()] == pytest.approx([0.0, best_clip("gaus", 5)], rel=0.02)
    mean, b = torch.tensor([0.0, 0.7, -3.0]).double(), torch.tensor([0.5, 1.0, 0.25]).double()
    assert torch.allclose(laplace_scale(mean.abs() + b * torch.exp(-mean.abs() / b), mean), b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["int8", "int4", "uint8 symmetric"])
def test_power_of_two_search(kind, spec):
    spec, x = QuantSpec.parse(spec), draw(kind)
    reach = float(x.abs().max()) if spec.format.signed else float(x.max())
    first = math.ceil(math.log2(reach / spec.qmax))
    tried = {2.0 ** (first - i): None for i in range(5)}
    for scale in tried:
        back = (x.double() / scale).round().clamp(spec.qmin, spec.qmax) * scale
        tried[scale] = float((back - x).square().mean())
    for cls in (MinMaxFloorObserver, PoTModeObserver):
        observer = cls(spec)
        observer(x)
        scale, zero_point = observer.qparams()
        assert tried[float(scale)] <= 1.01 * min(tried.values())
        assert int(zero_point) == 0
        held = cls(spec, candidates=1)
        held(x)
        assert float(held.qparams()[0]) == 2.0**first


def test_the_mode_of_exponents():
    observer = PoTModeObserver(QuantSpec.parse("int8"), candidates=1)
    for top in (1.9, 0.9, 7.0, 0.8, 0.7, 3.0):
        observer(torch.tensor([-top, top]))
    assert float(observer.qparams()[0]) == 2.0**-7
    tie = PoTModeObserver(QuantSpec.parse("int8"), candidates=1)
    for top in (0.9, 7.0):
        tie(torch.tensor([-top, top]))
    assert float(tie.qparams()[0]) == 2.0**-4
    tie.merge(observer)
    assert float(tie.qparams()[0]) == 2.0**-7


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("MSEObserver", {"p": 0}, "p, the power of the error, must be above 0, not 0"),
        ("EMAMSEObserver", {"p": -1.0}, "p, the power of the error, must be above 0, not -1.0"),
        ("EMAMSEObserver", {"ema_ratio": 1.0}, "ema_ratio must be at least 0 and below 1, not 1.0"),
        ("MSEObserver", {"bins": 1000}, "bins must be a power of two from 16 to 2..20, not 1000"),
        ("HistogramObserver", {"bins": 8}, "bins must be a power of two from 16 to 2..20, not 8"),
        ("HistogramObserver", {"percentile": 40}, "percentile must be from 50 to 100, not 40"),
        ("PercentileObserver", {"percentile": 0}, "percentile must be above 0 and at most 100, not 0"),
        ("PercentileObserver", {"alpha": 1.0}, "alpha must be at least 0 and below 1, not 1.0"),
        ("EMAQuantileObserver", {"threshold": 1.5}, "threshold must be above 0 and at most 1, not 1.5"),
        ("ClipStdObserver", {"std_scale": 0}, "std_scale must be above 0, not 0"),
        ("LSQPlusObserver", {"std_scale": -1}, "std_scale must be above 0, not -1"),
        ("MinMaxFloorObserver", {"candidates": 0}, "must be from 1 to 64, not 0"),
        ("PoTModeObserver", {"candidates": 0}, "must be from 1 to 64, not 0"),
        ("ACIQObserver", {"distribution": "gauss"}, "unknown distribution 'gauss': did you mean 'gaus'"),
    ],
)
def test_options_are_checked(name, options, message):
    with pytest.raises(ConfigError, match=message):
        OBSERVERS.get(name)(QuantSpec.parse("int8"), **options)
