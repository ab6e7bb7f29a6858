"""MSE and KL observers pick within 1 % of an exhaustive search of the data itself, whatever the data and the spec."""

import itertools
import math

import numpy as np
import pytest
import torch

from bitwright.errors import ConfigError
from bitwright.numerics import scale_and_zero_point
from bitwright.numerics.fp8 import BY_NAME, to_fp8
from bitwright.observers import OBSERVERS
from bitwright.observers.ema_mse import EMAMSEObserver
from bitwright.observers.kl import KLObserver
from bitwright.observers.mse import MSEObserver
from bitwright.observers.search.entropy import LEAST_PER_LEVEL, PER_BIN
from bitwright.spec import QuantSpec

KINDS = ["gauss", "laplace", "uniform", "bimodal", "outlier", "relu", "shifted", "constant", "zero", "channel of zeros"]
CHANNELS = 3
POWERS = (1.0, 2.0, 2.4)
SYMMETRIC, AFFINE = 200, 40  # how many ends an exhaustive search tries; of affine ranges, all pairs


def draw(kind, count, seed=0):
    """(CHANNELS, count) values."""
    g = torch.Generator().manual_seed(seed + count)
    normal, uniform = torch.randn(CHANNELS, count, generator=g), torch.rand(CHANNELS, count, generator=g)
    if kind == "outlier":
        normal[:, count // 2] = 40.0
    if kind == "channel of zeros":
        normal[2] = 0.0
    made = {
        "laplace": -torch.log(1 - uniform * 0.999999) * normal.sign(),
        "uniform": uniform * 3 - 1,
        "bimodal": normal * 0.3 + torch.where(uniform < 0.4, -2.0, 3.0),
        "relu": normal.relu(),
        "shifted": normal + 1.5,
        "constant": torch.full((CHANNELS, count), -2.7),
        "zero": torch.zeros(CHANNELS, count),
    }
    return made.get(kind, normal)


def errors(x, lo, hi, spec, powers):
    """Mean |x - x_q|**p of (channels, values) for ranges (channels, candidates), the plain way, in float64."""
    scale, zero = (v.double().unsqueeze(2) for v in scale_and_zero_point(lo, hi, spec))
    result = torch.empty(len(powers), *lo.shape, dtype=torch.float64)
    step, x = max(1, (1 << 19) // x.numel()), x.double().unsqueeze(1)
    for k in range(0, lo.shape[1], step):
        s, z = scale[:, k : k + step], zero[:, k : k + step]
        away = (((x / s).round_() + z).clamp_(spec.qmin, spec.qmax) - z).mul_(s).sub_(x).abs_()
        for i, p in enumerate(powers):
            result[i, :, k : k + step] = (away.square() if p == 2 else away.pow(p)).mean(2)
    return result


def exhaustive(x, spec, powers):
    """The least errors of ranges whose end (symmetric) or ends (affine) go in steps through the data's range."""
    lo, hi = x.amin(1, keepdim=True).clamp(max=0).double(), x.amax(1, keepdim=True).clamp(min=0).double()
    steps = SYMMETRIC if spec.symmetric else AFFINE
    part = torch.linspace(1 / steps, 1, steps, dtype=torch.float64)
    one = other = part.unsqueeze(0)
    if not spec.symmetric:
        one, other = (v.reshape(1, -1) for v in torch.meshgrid(part, part, indexing="ij"))
    return errors(x, lo * one, hi * other, spec, powers).amin(2)


def check(x, observers, spec, powers=POWERS):
    """Compare the errors of the ranges that observers of (channels, values) found, one for each power."""
    for p, observer, least in zip(powers, observers, exhaustive(x, spec, powers), strict=True):
        lo, hi = (v.reshape(-1, 1) for v in observer.range())
        got = errors(x, lo, hi, spec, (p,))[0, :, 0]
        rounding = (x.double().abs().amax(1) * 1e-6) ** p  # a scale in float32 cannot do better
        assert bool((got <= 1.01 * least + rounding).all()), (p, (got / least).tolist())


def observed(spec, batches, powers=POWERS, cls=MSEObserver):
    observers = [cls(QuantSpec.parse(spec), p=p) for p in powers]
    for observer, batch in itertools.product(observers, batches):
        observer(batch)
    return observers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["int8", "int4", "int3 narrow", "int2", "uint8 symmetric", "int4 pot", "int12"])
def test_symmetric_channels(kind, spec):
    for count in (1, 2, 7, 48, 64, 600, 5_000, *(() if spec == "int12" else (9_000,))):  # bins are wider than 12 bits
        x = draw(kind, count)
        check(x, observed(f"{spec} channel:0", x.split(max(1, count // 3), 1)), QuantSpec.parse(spec))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["int8 affine", "uint4", "uint3", "uint2", "uint4 pot", "uint5"])
def test_affine_channels(kind, spec):
    for count in (1, 3, 40, 130, 600):
        x = draw(kind, count)
        check(x, observed(f"{spec} channel:0", [x]), QuantSpec.parse(spec))


@pytest.mark.parametrize("kind", ["laplace", "bimodal", "outlier", "shifted"])
@pytest.mark.parametrize("spec", ["int8 affine", "uint4", "uint2"])
@pytest.mark.parametrize("count", [5_000, 9_000])
def test_affine_channels_of_many_values(kind, spec, count):
    x = draw(kind, count)[:1]
    check(x, observed(f"{spec} channel:0", [x], (2.0,)), QuantSpec.parse(spec), (2.0,))


@pytest.mark.parametrize("kind", ["gauss", "laplace", "outlier", "relu"])
@pytest.mark.parametrize("spec", ["int8", "int4", "uint4"])
def test_whole_tensors_whose_range_grows(kind, spec):
    x = draw(kind, 4_000).reshape(1, -1)
    batches = [part * scale for part, scale in zip(x.split(4_000, 1), (0.01, 0.4, 2.5), strict=True)]
    check(torch.cat(batches, 1), observed(spec, batches, (2.0,)), QuantSpec.parse(spec), (2.0,))


@pytest.mark.parametrize("spec", ["int4", "uint4", "int8", "uint2"])
def test_groups_of_tensors_that_are_not_contiguous(spec):
    for size in (16, 64):
        base = draw("laplace", size * 12).reshape(CHANNELS, 6, size * 2).transpose(1, 2)  # (3, 2·size, 6)
        assert not base.is_contiguous()
        (observer,) = observed(f"{spec} group:{size}:1", [base], (2.0,), EMAMSEObserver)
        rows, plain = base.permute(0, 2, 1).reshape(-1, size), QuantSpec.parse(spec)
        lo, hi = (v.permute(0, 2, 1).reshape(-1, 1) for v in observer.range())
        got = errors(rows, lo, hi, plain, (2.0,))[0, :, 0]
        assert bool((got <= 1.01 * exhaustive(rows, plain, (2.0,))[0] + 1e-12).all())


@pytest.mark.parametrize("spec", ["int8", "int4", "uint4", "uint8", "int4 pot", "uint4 pot"])
@pytest.mark.parametrize("count", [5, 100, 9_000])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-12, 1e37])
def test_sizes_at_the_ends_of_float32(spec, count, size):
    x = draw("uniform", count) * size
    (observer,) = observed(f"{spec} channel:0", [x], (2.0,))
    lo, hi = observer.range()
    assert bool((torch.isfinite(lo) & torch.isfinite(hi) & (lo <= 0) & (hi >= 0)).all())
    scale = observer.qparams()[0]
    assert bool(torch.isfinite(scale).all())
    if size >= 1e-12:  # smaller ones all have the smallest scale
        plain = draw("uniform", count)
        (alone,) = observed(f"{spec} channel:0", [plain], (2.0,))
        ratio = scale.double() / size / alone.qparams()[0].double()
        assert bool(((ratio > 0.45) & (ratio < 2.1)).all())


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("count", [60, 9_000])
def test_fp8_on_its_own_grid(name, count):
    x = draw("gauss", count) * torch.tensor([[1.0], [1e-3], [50.0]])
    x[1, 0] = 30.0  # far above all others
    observer = MSEObserver(QuantSpec.parse(f"{name} channel:0"))
    observer(x)

    def cost(top):
        scale = top / BY_NAME[name].top
        return (to_fp8(x / scale, BY_NAME[name]).float() * scale - x).double().square().mean(1)

    tops = x.abs().amax(1, keepdim=True)
    least = torch.stack([cost(tops * part) for part in torch.linspace(1 / SYMMETRIC, 1, SYMMETRIC)]).amin(0)
    found = torch.maximum(-observer.range()[0], observer.range()[1]).unsqueeze(1)
    assert bool((cost(found) <= 1.01 * least).all())


@pytest.mark.parametrize("name", ["KLObserver", "MinMaxFloorObserver", "PoTModeObserver"])
def test_searches_that_count_integers_refuse_fp8(name):
    with pytest.raises(ConfigError, match=f"{name} needs integers, and 'e4m3 symmetric tensor' has none: choose MSE"):
        OBSERVERS.get(name)(QuantSpec.parse("e4m3"))


def divergence(counts, held, levels):
    """KL(P || Q) as the docstring of ``entropy.py`` says it, level by level."""
    reference = counts[:held].copy()
    reference[-1] += counts[held:].sum()
    if counts[:held].sum() < counts.sum() / 2:
        return math.inf
    candidate = np.zeros(held)
    borders = (np.arange(levels + 1) * held + levels // 2) // levels
    for start, stop in itertools.pairwise(borders):
        filled = reference[start:stop] > 0
        candidate[start:stop] = filled * max(counts[start:stop].sum(), 0.5) / max(filled.sum(), 1)
    used = reference > 0
    p, q = reference[used] / reference.sum(), candidate[used] / counts[:held].sum()
    return float((p * np.log(p / q)).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("spec", "levels"), [("int8", 128), ("int4", 8), ("int3", 4), ("int2", 2)])
def test_entropy(kind, spec, levels):
    for count in (1, 30, 8_000):
        x = draw(kind, count)
        observer = KLObserver(QuantSpec.parse(f"{spec} channel:0"), bins=1024)
        for batch in x.split(max(1, count // 2), 1):
            observer(batch)
        for row, low, high in zip(x, *observer.range(), strict=True):
            top = float(row.abs().max())
            if top == 0:
                assert low == high == 0
                continue
            bins = min(512, max(LEAST_PER_LEVEL * levels, 2 ** int(math.log2(max(count / PER_BIN, 1)))))
            width = 2.0 ** (math.floor(math.log2(top)) + 1) / bins
            counts = np.bincount((row.abs().double() / width).long().numpy(), minlength=bins).astype(np.float64)
            counts[0] = min(counts[0], counts[1])
            used, clip = int(top / width) + 1, max(-float(low), float(high))
            costs = {i: divergence(counts, i, levels) for i in range(max(levels, bins // 16), used + 1, 5)}
            picked = divergence(counts, used if clip == top else round(clip / width), levels)
            least = min(costs.values(), default=math.inf)
            assert math.isnan(least) or not least < math.inf or picked <= least + 0.01 * abs(least) + 1e-9
