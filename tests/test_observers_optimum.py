"""MSE and KL observers pick within 1 % of an exhaustive search of the data itself, whatever the data and the spec."""

import itertools
import math

import numpy as np
import pytest
import torch

from bitwright.numerics import scale_and_zero_point
from bitwright.observers import EMAMSEObserver, KLObserver, MSEObserver
from bitwright.spec import QuantSpec

KINDS = ["gauss", "laplace", "uniform", "bimodal", "outlier", "relu", "shifted", "constant", "zero", "channel of zeros"]
CHANNELS = 3


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


def errors(x, lo, hi, spec, p):
    """Mean |x - x_q|**p of (channels, values) for ranges (channels, candidates), the plain way, in float64."""
    scale, zero = (v.double() for v in scale_and_zero_point(lo, hi, spec))
    result = torch.empty_like(scale)
    for k in range(lo.shape[1]):
        s, z = scale[:, k : k + 1], zero[:, k : k + 1]
        back = (((x.double() / s).round() + z).clamp(spec.qmin, spec.qmax) - z) * s
        result[:, k] = (x - back).abs().pow(p).mean(1)
    return result


def exhaustive(x, spec, p, steps):
    """The least error of ranges whose end (symmetric) or ends (affine) go in so many steps through the data's range."""
    lo, hi = x.amin(1, keepdim=True).clamp(max=0).double(), x.amax(1, keepdim=True).clamp(min=0).double()
    part = torch.linspace(1 / steps, 1, steps, dtype=torch.float64).unsqueeze(0)
    if spec.symmetric:
        return errors(x, lo * part, hi * part, spec, p).amin(1)
    one, other = (v.reshape(1, -1) for v in torch.meshgrid(part[0], part[0], indexing="ij"))
    return errors(x, lo * one, hi * other, spec, p).amin(1)


def check(x, observer, spec, p, steps):
    lo, hi = (v.reshape(-1, 1) for v in observer.range())
    got = errors(x, lo, hi, spec, p).squeeze(1)
    # A scale in float32 cannot do better than rounding.
    rounding = (x.double().abs().amax(1) * 1e-6) ** p
    least = exhaustive(x, spec, p, steps)
    assert bool((got <= 1.01 * least + rounding).all()), (got / least).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["int8", "int4", "int3 narrow", "int2", "uint8 symmetric", "int4 pot"])
@pytest.mark.parametrize("count", [1, 2, 7, 64, 700, 6_000])
def test_symmetric_channels(kind, spec, count):
    x = draw(kind, count)
    observer = MSEObserver(QuantSpec.parse(f"{spec} channel:0"))
    for batch in x.split(max(1, count // 3), 1):
        observer(batch)
    check(x, observer, QuantSpec.parse(spec), 2.0, 300 if count < 100 else 80)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["int8 affine", "uint4", "uint3", "uint2"])
@pytest.mark.parametrize("count", [1, 3, 40, 500, 9_000])
def test_affine_channels(kind, spec, count):
    x = draw(kind, count)
    observer = MSEObserver(QuantSpec.parse(f"{spec} channel:0"))
    observer(x)
    check(x, observer, QuantSpec.parse(spec), 2.0, 25 if count < 1_000 else 10)


@pytest.mark.parametrize("kind", ["gauss", "laplace", "uniform", "bimodal", "outlier", "shifted"])
@pytest.mark.parametrize("p", [1.0, 2.4])
@pytest.mark.parametrize("spec", ["int8", "int4", "int2", "uint8", "uint3"])
def test_powers(kind, p, spec):
    for count in (5, 60, 9_000):
        x = draw(kind, count)
        observer = EMAMSEObserver(QuantSpec.parse(f"{spec} channel:0"), p=p)
        observer(x)
        steps = (100 if count < 1_000 else 40) if observer.spec.symmetric else (20 if count < 1_000 else 7)
        check(x, observer, QuantSpec.parse(spec), p, steps)


@pytest.mark.parametrize("kind", ["gauss", "laplace", "outlier", "relu"])
@pytest.mark.parametrize("spec", ["int8", "int4", "uint8", "uint4"])
def test_whole_tensors_whose_range_grows(kind, spec):
    spec = QuantSpec.parse(spec)
    x = draw(kind, 6_000).reshape(1, -1)
    batches = [part * scale for part, scale in zip(x.split(6_000, 1), (0.01, 0.4, 2.5), strict=True)]
    observer = MSEObserver(spec)
    for batch in batches:
        observer(batch)
    check(torch.cat(batches, 1), observer, spec, 2.0, 100 if spec.symmetric else 10)


@pytest.mark.parametrize("spec", ["int4", "uint4", "int8", "uint2"])
def test_groups_of_tensors_that_are_not_contiguous(spec):
    base = draw("laplace", 32 * 6).reshape(CHANNELS, 6, 32).transpose(1, 2)  # (3, 32, 6)
    assert not base.is_contiguous()
    observer = MSEObserver(QuantSpec.parse(f"{spec} group:16:1"))
    observer(base)
    rows = base.permute(0, 2, 1).reshape(-1, 16)
    ranges = [v.permute(0, 2, 1).reshape(-1, 1) for v in observer.range()]
    got = errors(rows, *ranges, QuantSpec.parse(spec), 2.0).squeeze(1)
    least = exhaustive(rows, QuantSpec.parse(spec), 2.0, 300 if QuantSpec.parse(spec).symmetric else 40)
    assert bool((got <= 1.01 * least + 1e-12).all())


def divergence(counts, held, levels):
    """KL(P || Q) as the docstring of ``kl.py`` says it, level by level."""
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
            width = 2.0 ** (math.floor(math.log2(top)) + 1) / 512
            counts = np.bincount((row.abs().double() / width).long().numpy(), minlength=512).astype(np.float64)
            counts[0] = min(counts[0], counts[1])
            used, clip = int(top / width) + 1, max(-float(low), float(high))
            costs = {i: divergence(counts, i, levels) for i in range(max(levels, 32), used + 1, 5)}
            picked = divergence(counts, used if clip == top else round(clip / width), levels)
            least = min(costs.values(), default=math.inf)
            assert math.isnan(least) or not least < math.inf or picked <= least + 0.01 * abs(least) + 1e-9
