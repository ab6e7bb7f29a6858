"""Streaming state: exact rebinning, merging, order, channels and groups, layouts, precisions, and degenerate data."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.errors import CalibrationError, ConfigError
from bitwright.observers import OBSERVERS, StreamingHistogram
from bitwright.observers.clip_std import ClipStdObserver
from bitwright.observers.ema_quantile import EMAQuantileObserver
from bitwright.observers.histogram import HistogramObserver
from bitwright.observers.lsq import LSQObserver
from bitwright.observers.lsq_plus import LSQPlusObserver
from bitwright.observers.percentile import PercentileObserver
from bitwright.spec import QuantSpec

NAMES = OBSERVERS.names("*Observer")
FOLLOWING = [n for n in NAMES if n != "FixedRangeObserver"]  # their ranges follow what is seen
MOVING = [n for n in NAMES if n.startswith("EMA")]
SEARCHED = ["HistogramObserver", "PercentileObserver", "MSEObserver", "KLObserver", "MinMaxFloorObserver"]


def ranges(observer):
    return torch.stack(observer.range())


def run(name, spec, *batches, **options):
    observer = OBSERVERS.get(name)(QuantSpec.parse(spec), **options)
    for batch in batches:
        observer(batch)
    return observer


def naive_counts(x, bins):
    """Counts in bins of the least power of two that holds the largest magnitude, value by value."""
    top = max(abs(float(v)) for v in x)
    width = 2.0 ** (math.floor(math.log2(top)) + 1) / (bins // 2)
    counts = [0] * bins
    for v in x:
        counts[math.floor(float(v) / width) + bins // 2] += 1
    return counts, width


values = st.lists(st.floats(-1e4, 1e4, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6), min_size=1, max_size=20)


@settings(max_examples=40, deadline=None)
@given(st.lists(values, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_counts_equal_those_of_the_final_width(batches, random):
    everything = [v for batch in batches for v in batch]
    if not any(everything):
        return
    for order in (batches, random.sample(batches, len(batches))):
        histogram = StreamingHistogram(16)
        for batch in order:
            histogram.add(torch.tensor(batch).reshape(1, 1, -1))
        counts, width = histogram.counts()
        expected, expected_width = naive_counts(everything, 16)
        assert counts[0].tolist() == expected
        assert float(width) == expected_width
        assert (histogram.exact() is not None) == (len(everything) <= 32)


def test_a_tiny_first_batch_does_no_harm():
    x = torch.randn(2, 3, 5_000) * torch.tensor([1e-3, 1.0, 1e3]).reshape(3, 1)
    small, whole = StreamingHistogram(1024), StreamingHistogram(1024)
    small.add(x[:, :, :1000] * 2.0**-40)
    small.add(x)
    whole.add(torch.cat([x, x[:, :, :1000] * 2.0**-40], 2))
    assert torch.equal(small.counts()[0], whole.counts()[0])
    assert torch.equal(small.counts()[1], whole.counts()[1])
    assert int(small.counts()[0].sum()) == 3 * 12_000


def test_state_is_bounded_by_channels_times_bins():
    observer = run("MSEObserver", "int8 channel:1", *(torch.randn(50, 4, 30) for _ in range(5)), bins=256)
    tensors = [v for v in vars(observer.histogram).values() if isinstance(v, torch.Tensor)]
    assert sum(v.numel() for v in tensors) == 4 * 256 + 3 * 4
    few = run("MSEObserver", "int8 channel:1", torch.randn(8, 4, 30), bins=256)
    assert few.histogram.exact().shape == (4, 240)
    assert few.histogram.counts()[0].sum(1).tolist() == [240] * 4


@pytest.mark.parametrize("name", [n for n in NAMES if n not in MOVING])
@pytest.mark.parametrize("spec", ["int8", "uint4 channel:1", "int4 group:5:-1"])
def test_merged_halves_equal_the_whole_in_any_order(name, spec):
    batches = [torch.randn(60, 6, 30) * s + 0.1 for s in (0.01, 1.0, 3.0, 0.5)]
    if "group" in spec:
        batches = [b[:3] for b in batches]
    options = {"bins": 256} if name in [*SEARCHED, "PoTModeObserver"] else {}
    whole = run(name, spec, *batches, **options)
    turned = run(name, spec, *batches[::-1], **options)
    left, right = run(name, spec, *batches[:1], **options), run(name, spec, *batches[1:], **options)
    untouched = ranges(right).clone()
    left.merge(right)
    empty = run(name, spec, **options)
    empty.merge(whole)
    for other in (turned, left, empty):
        torch.testing.assert_close(ranges(other), ranges(whole), rtol=1e-5, atol=1e-6)
        assert other.batches == 4
    if name in SEARCHED:
        assert torch.equal(ranges(left), ranges(whole))
    assert torch.equal(ranges(right), untouched)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [40, 1_500])
def test_channels_equal_a_loop_of_tensors(name, count):
    x = torch.randn(4, count, generator=torch.Generator().manual_seed(1))
    x = x * torch.tensor([1.0, 100.0, 0.01, 1.0]).reshape(4, 1)
    x[3] = x[3].abs()
    options = {} if name not in SEARCHED else {"bins": 1024}
    for spec in ("int4", "uint8"):
        together = ranges(run(name, f"{spec} channel:0", x, x / 2, **options))
        alone = torch.stack([ranges(run(name, spec, row, row / 2, **options)) for row in x], 1)
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_layouts_groups_and_half_precision(name):
    base = torch.randn(4, 6, 5, 8, generator=torch.Generator().manual_seed(2))
    for spec in ("int8", "int8 channel:1", "int4 group:3:1"):
        expected = ranges(run(name, spec, base))
        for x in (
            base.contiguous(memory_format=torch.channels_last),
            base.transpose(1, 3).contiguous().transpose(1, 3),
        ):
            torch.testing.assert_close(ranges(run(name, spec, x)), expected, rtol=1e-5, atol=1e-6)
        padded = torch.zeros(4, 6, 5, 16)
        padded[..., ::2] = base
        torch.testing.assert_close(ranges(run(name, spec, padded[..., ::2])), expected, rtol=1e-5, atol=1e-6)
        half = base.bfloat16()
        got = ranges(run(name, spec, half))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, ranges(run(name, spec, half.float())), rtol=1e-5, atol=1e-6)
    groups = ranges(run(name, "int4 group:3:1", base))
    assert groups.shape == (2, 4, 2, 5, 8)
    one = ranges(run(name, "int4", base[1, 3:6, 2, 7]))
    torch.testing.assert_close(groups[:, 1, 1, 2, 7], one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("count", [1, 30, 9_000])
def test_zeros_and_constants(name, count):
    for spec in ("int8", "uint8", "int4 channel:0"):
        zero = run(name, spec, torch.zeros(1, count))
        assert bool((ranges(zero).abs() < 1e-12).all())
        scale, _ = zero.qparams()
        assert bool((scale > 0).all())
        constant = run(name, spec, torch.full((1, count), 3.0))
        lo, hi = constant.range()
        assert float(lo) <= 3.0001
        if name not in ("LSQObserver", "LSQPlusObserver"):
            assert 3.0 <= float(hi) * 1.0001 <= 6.0
        assert bool(torch.isfinite(constant.qparams()[0]).all())


@pytest.mark.parametrize("name", FOLLOWING)
def test_an_all_zero_channel_beside_others(name):
    x = torch.randn(3, 700)
    x[1] = 0
    observer = run(name, "int8 channel:0", x)
    assert bool((ranges(observer)[:, 1].abs() < 1e-12).all())
    assert bool((ranges(observer)[1, [0, 2]] > 0.5).all())
    assert run(name, "int8 channel:0", torch.empty(3, 0)).batches == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_noticed(name, bad):
    x = torch.randn(3, 50)
    x[1, 7] = bad
    for spec in ("int8", "int8 channel:0"):
        observer = run(name, spec, torch.randn(3, 50), x, torch.randn(3, 50))
        assert not bool(torch.isfinite(torch.stack(observer.seen())).all())
        with pytest.raises(CalibrationError, match="NaN or infinity was seen"):
            observer.qparams()
        observer.reset()
        observer(torch.ones(3, 50))
        assert bool(torch.isfinite(ranges(observer)).all())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_seen_reset_and_copies(name):
    observer = run(name, "uint8")
    with pytest.raises(CalibrationError, match="no data was seen"):
        observer.qparams()
    with pytest.raises(RuntimeError, match=r"range\(\) before the first observe\(\)"):
        observer.range()
    observer(torch.randn(100))
    twin = copy.deepcopy(observer)
    assert torch.equal(ranges(twin), ranges(observer))
    twin.reset()
    assert twin.batches == 0
    assert observer.batches == 1
    with pytest.raises(ConfigError, match="cannot merge"):
        observer.merge(run(name, "int8"))


def test_seen_is_the_whole_range_while_range_is_searched():
    x = torch.randn(5_000)
    observer = run("PercentileObserver", "int8", x, percentile=90)
    assert observer.seen() == (x.min(), x.max())
    assert observer.range()[1] < x.max()


@pytest.mark.parametrize("count", [1_001, 50_001])
def test_percentiles(count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(3)).double() + 0.3
    for percentile in (90.0, 99.0, 99.9, 100.0):
        lo, hi = run("PercentileObserver", "int8", x.float(), percentile=percentile).range()
        positive, negative = x[x > 0], x[x < 0]
        share = percentile / 100
        assert float(hi) == pytest.approx(float(torch.quantile(positive, share)), rel=0.02)
        assert float(lo) == pytest.approx(float(torch.quantile(negative, 1 - share)), rel=0.02)
        lo, hi = run("HistogramObserver", "int8", x.float(), percentile=percentile).range()
        assert float(hi) == pytest.approx(float(torch.quantile(x, 0.5 + share / 2)), rel=0.01)
        assert float(lo) == pytest.approx(float(torch.quantile(x, 0.5 - share / 2)), rel=0.01)
    same = PercentileObserver(QuantSpec.parse("int8"), alpha=0.001)
    assert same.percentile == pytest.approx(99.9)
    relu = x.float().relu()
    hi = run("PercentileObserver", "uint8", relu, percentile=99.0).range()[1]
    assert float(hi) == pytest.approx(float(torch.quantile(relu[relu > 0].double(), 0.99)), rel=0.02)


def test_moving_average_of_quantiles():
    observer = EMAQuantileObserver(QuantSpec.parse("int8"), threshold=0.99, ema_ratio=0.8)
    lo = hi = None
    for scale in (1.0, 3.0, 0.5):
        x = torch.randn(20_000) * scale
        observer(x)
        clip = float(torch.quantile(x.abs(), 0.99))
        low, high = max(float(x.min()), -clip), min(float(x.max()), clip)
        lo, hi = (low, high) if lo is None else (0.8 * lo + 0.2 * low, 0.8 * hi + 0.2 * high)
    assert [float(v) for v in observer.range()] == pytest.approx([lo, hi], rel=0.01)


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_standard_deviations_are_clipped_and_never_widened(shift):
    x = torch.randn(8, 9_000) + shift
    observer = run("ClipStdObserver", "int8 affine channel:0", *x.split(2_500, 1))
    mean, std = x.double().mean(1), x.double().std(1, correction=0)
    lo, hi = observer.range()
    torch.testing.assert_close(lo.double(), mean - 2.6 * std, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(hi.double(), mean + 2.6 * std, rtol=1e-4, atol=1e-3)
    uniform = torch.rand(1_000) * 2 - 1
    wide = ClipStdObserver(QuantSpec.parse("int8"))
    wide(uniform)
    assert wide.range() == (uniform.min(), uniform.max())


@pytest.mark.parametrize("spec", ["int4", "uint4", "int8 narrow channel:0", "uint8 symmetric", "int4 pot"])
def test_lsq_starts(spec):
    spec, x = QuantSpec.parse(spec), torch.randn(6, 400) + 0.2
    observer = LSQObserver(spec)
    for batch in x.split(100, 1):
        observer(batch)
    grain = {"dim": 1} if observer.range()[0].ndim else {}
    expected = 2 * x.abs().mean(**grain) / spec.qmax**0.5
    expected = expected.log2().round().exp2() if spec.power_of_two else expected
    scale, zero_point = observer.qparams()
    torch.testing.assert_close(scale, expected, rtol=1e-4, atol=1e-6)
    if not spec.symmetric:
        assert int(zero_point) == max(0, min(15, spec.qmin - round(float(x.min() / expected))))
    plus = LSQPlusObserver(spec)
    plus(x)
    mean, std = x.mean(**grain), x.std(correction=0, **grain)
    if spec.symmetric and not spec.power_of_two:
        expected = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / (spec.qmax + 1)
        torch.testing.assert_close(plus.qparams()[0], expected, rtol=1e-4, atol=1e-6)


def test_histograms_are_there_to_look_at():
    observer = HistogramObserver(QuantSpec.parse("int8"), bins=64)
    observer(torch.tensor([-1.0, 0.0, 0.0, 0.49, 1.0]))
    counts, width = observer.histogram.counts()
    assert float(width) == 2 / 32
    assert {i - 32: n for i, n in enumerate(counts[0].tolist()) if n} == {-16: 1, 0: 2, 7: 1, 16: 1}
    with pytest.raises(ConfigError, match="histograms of 32 and 64 bins cannot be merged"):
        observer.histogram.merge(StreamingHistogram(32))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("MINMAX", "MinMaxObserver"),
        ("MOVING_AVERAGE", "EMAMinMaxObserver"),
        ("PERCENTILE", "PercentileObserver"),
        ("percentile", "PercentileObserver"),
        ("MSE", "MSEObserver"),
        ("mse", "MSEObserver"),
        ("KL_HISTOGRAM", "KLObserver"),
        ("kl_histogram", "KLObserver"),
        ("entropy", "KLObserver"),
        ("ACIQ", "ACIQObserver"),
        ("aciq", "ACIQObserver"),
        ("EMAMinMaxFloorObserver", "PoTModeObserver"),
        ("ModeMinMaxFloor", "PoTModeObserver"),
        ("histogram", "HistogramObserver"),
    ],
)
def test_names_of_other_dialects(alias, name):
    assert OBSERVERS.get(alias) is OBSERVERS.get(name)
