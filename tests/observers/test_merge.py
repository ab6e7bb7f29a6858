"""Every observer: two halves merged are the whole, and the order of batches matters only where an average has one."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.errors import ConfigError
from bitwright.observers import OBSERVERS
from bitwright.observers.ema_minmax import EMAMinMaxObserver
from bitwright.spec import QuantSpec

NAMES = OBSERVERS.names("*Observer")
BINNED = {"EMAMSEObserver", "EMAQuantileObserver", "HistogramObserver", "KLObserver", "MSEObserver"}
BINNED |= {"MinMaxFloorObserver", "PercentileObserver", "PoTModeObserver"}

names = st.sampled_from(NAMES)
specs = st.sampled_from(["int8", "uint4", "int4 channel:1", "uint8 channel:-1", "int3 group:2:-1"])
# (size of the batch, scale, seed); 8 values of a channel and batch are few, 400 are counted in 32 bins.
batches = st.lists(
    st.tuples(st.sampled_from([1, 8, 400]), st.sampled_from([0.0, 0.01, 1.0, 30.0]), st.integers(0, 99)),
    min_size=1,
    max_size=5,
)


def seen(name, spec, data):
    """An observer after batches of (size, 2, 4); groups need the same shape each time."""
    observer = OBSERVERS.get(name)(QuantSpec.parse(spec), **({"bins": 32} if name in BINNED else {}))
    for size, scale, seed in data:
        size = 3 if "group" in spec else size
        observer(torch.randn(size, 2, 4, generator=torch.Generator().manual_seed(seed)) * scale)
    return observer


def same(one, other):
    assert one.batches == other.batches
    assert one.param_shape == other.param_shape
    for a, b in zip(one.range(), other.range(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(names, specs, batches, batches)
def test_halves_merged_are_the_whole(name, spec, first, second):
    left, right = seen(name, spec, first), seen(name, spec, second)
    before = [v.clone() for v in right.range()]
    left.merge(right)
    same(left, seen(name, spec, first + second))
    assert all(torch.equal(a, b) for a, b in zip(right.range(), before, strict=True))


@settings(max_examples=100, deadline=None)
@given(names.filter(lambda n: not n.startswith("EMA")), specs, batches, st.randoms(use_true_random=False))
def test_order_does_not_matter(name, spec, data, random):
    same(seen(name, spec, data), seen(name, spec, random.sample(data, len(data))))


@settings(max_examples=40, deadline=None)
@given(batches, batches, batches, st.sampled_from([0.0, 0.3, 0.9]))
def test_three_moving_averages_in_order(one, two, three, ratio):
    spec = QuantSpec.parse("int8 channel:1")

    def average(*parts):
        observer = EMAMinMaxObserver(spec, ema_ratio=ratio)
        for size, scale, seed in itertools.chain(*parts):
            observer(torch.randn(size, 2, 4, generator=torch.Generator().manual_seed(seed)) * scale)
        return observer

    left, right = average(one), average(two)
    right.merge(average(three))
    left.merge(right)
    same(left, average(one, two, three))


def test_channels_stay_the_same_over_batches_of_any_size():
    observer = OBSERVERS.get("MSEObserver")(QuantSpec.parse("int8 channel:1"))
    for size in (4, 4, 1):
        observer(torch.randn(size, 5, 3, 3))
    assert observer.qparams()[0].shape == (5,)
    square = torch.randn(6, 6) * torch.tensor([1.0, 9.0, 1.0, 1.0, 1.0, 1.0])  # the second column is large
    columns = OBSERVERS.get("MSEObserver")(QuantSpec.parse("int8 channel:1"))
    columns(square)
    alone = OBSERVERS.get("MSEObserver")(QuantSpec.parse("int8"))
    alone(square[:, 1])
    torch.testing.assert_close(columns.range()[1][1], alone.range()[1])


@pytest.mark.parametrize(
    ("name", "mine", "theirs", "message"),
    [
        ("MSEObserver", {}, {"p": 2.4}, r"MSEObserver with p=2.4 into one with p=2.0: observers of the same data"),
        ("EMAMSEObserver", {"ema_ratio": 0.5}, {}, r"EMAMSEObserver with ema_ratio=0.9 into one with ema_ratio=0.5"),
        ("EMAMinMaxObserver", {}, {"ema_ratio": 0.0}, r"with ema_ratio=0.0 into one with ema_ratio=0.9"),
        ("HistogramObserver", {"bins": 64}, {"bins": 32}, r"HistogramObserver with bins=32 into one with bins=64"),
        ("ACIQObserver", {"distribution": "laplace"}, {}, r"with distribution='gaus' into one with distribution="),
        ("ClipStdObserver", {"std_scale": 2}, {"std_scale": 3}, r"with std_scale=3 into one with std_scale=2"),
        ("PoTModeObserver", {}, {"candidates": 2}, r"with candidates=2 into one with candidates=5"),
    ],
)
def test_observers_with_other_options_are_not_merged(name, mine, theirs, message):
    one, other = (OBSERVERS.get(name)(QuantSpec.parse("int8"), **options) for options in (mine, theirs))
    one(torch.ones(3))
    other(torch.ones(3))
    with pytest.raises(ConfigError, match=message):
        one.merge(other)


def test_observers_of_other_specs_or_kinds_are_not_merged():
    one = OBSERVERS.get("MSEObserver")(QuantSpec.parse("int8"), 2.0)
    with pytest.raises(
        ConfigError, match="cannot merge MSEObserver of 'int4 symmetric tensor' into MSEObserver of 'int8"
    ):
        one.merge(OBSERVERS.get("MSEObserver")(QuantSpec.parse("int4")))
    with pytest.raises(ConfigError, match="cannot merge KLObserver of 'int8 symmetric tensor' into MSEObserver"):
        one.merge(OBSERVERS.get("KLObserver")(QuantSpec.parse("int8")))
    same_options = OBSERVERS.get("MSEObserver")(QuantSpec.parse("int8"), p=2.0, bins=4096)  # said in another way
    same_options(torch.tensor([3.0]))
    one.merge(same_options)
    assert one.batches == 1
