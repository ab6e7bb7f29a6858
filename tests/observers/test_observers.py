"""Observers: ranges against brute force, independence of order, merging, and what they refuse."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.errors import CalibrationError, ConfigError, UnknownNameError
from bitwright.numerics import scale_and_zero_point
from bitwright.observers import OBSERVERS, Observer, register_observer
from bitwright.observers.ema_minmax import EMAMinMaxObserver
from bitwright.observers.minmax import MinMaxObserver
from bitwright.spec import QuantSpec

GRAINS = {
    "tensor": (3, 4, 5),
    "channel:0": (3, 4, 5),
    "channel:1": (3, 4, 5),
    "channel:-1": (3, 4, 5),
    "group:2:1": (3, 4, 5),
    "group:3:0": (3, 4, 5),
    "group:5:-1": (3, 4, 5),
    "group:4:-1": (2, 8),
}


def brute_force(x, spec):
    """Lowest and highest value for each scale, value by value."""
    shape = spec.param_shape(tuple(x.shape))
    low, high = np.full(shape, np.inf, np.float32), np.full(shape, -np.inf, np.float32)
    axis, size = getattr(spec.granularity, "axis", 0) % x.ndim, getattr(spec.granularity, "size", 0)
    for index in np.ndindex(*x.shape):
        place = ()
        if len(shape) == 1 and not size:
            place = (index[axis],)
        elif size:
            place = tuple(i // size if d == axis else i for d, i in enumerate(index))
        value = np.float32(float(x[index]))
        low[place], high[place] = min(low[place], value), max(high[place], value)
    return torch.from_numpy(low), torch.from_numpy(high)


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_range_equals_brute_force(grain, dtype):
    spec = QuantSpec.parse(f"int8 {grain}")
    x = torch.randn(GRAINS[grain]).to(dtype)
    observer = MinMaxObserver(spec)
    observer(x)
    lo, hi = observer.range()
    expected = brute_force(x, spec)
    assert lo.dtype == hi.dtype == torch.float32
    assert torch.equal(lo, expected[0])
    assert torch.equal(hi, expected[1])
    assert lo.shape == spec.param_shape(tuple(x.shape)) == observer.param_shape


@pytest.mark.parametrize("grain", ["tensor", "channel:0", "channel:1", "channel:3", "group:2:1", "group:3:3"])
def test_memory_layout_does_not_matter(grain):
    spec = QuantSpec.parse(f"int8 {grain}")
    base = torch.randn(2, 4, 5, 3)
    for x in (
        base.contiguous(memory_format=torch.channels_last),
        base.transpose(0, 2).contiguous().transpose(0, 2),
    ):
        observer = MinMaxObserver(spec)
        observer(x)
        assert all(torch.equal(a, b) for a, b in zip(observer.range(), brute_force(base, spec), strict=True))


def test_single_values_and_vectors():
    observer = MinMaxObserver(QuantSpec.parse("int8"))
    observer(torch.tensor(-2.5))
    assert [float(v) for v in observer.range()] == [-2.5, -2.5]
    observer = MinMaxObserver(QuantSpec.parse("int8 channel:0"))
    observer(torch.tensor([1.0, -3.0]))
    assert [v.tolist() for v in observer.range()] == [[1.0, -3.0], [1.0, -3.0]]


batches = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6), min_size=1, max_size=6)


@given(batches, st.randoms(use_true_random=False))
def test_order_of_batches_does_not_matter(data, random):
    shuffled = random.sample(data, len(data))
    results = []
    for order in (data, shuffled):
        observer = MinMaxObserver(QuantSpec.parse("uint8"))
        for batch in order:
            observer(torch.tensor(batch))
        results.append(observer.range())
    values = [v for batch in data for v in batch]
    assert results[0] == results[1] == (torch.tensor(min(values)), torch.tensor(max(values)))


@given(batches, batches, st.sampled_from(["tensor", "channel:0"]))
def test_merged_halves_equal_the_whole(first, second, grain):
    spec = QuantSpec.parse(f"uint8 {grain}")

    def seen(*parts):
        observer = MinMaxObserver(spec)
        for batch in itertools.chain(*parts):
            observer(torch.tensor([batch]))
        return observer

    whole, left, right = seen(first, second), seen(first), seen(second)
    left.merge(right)
    assert left.range() == whole.range()
    assert left.batches == whole.batches
    assert left.qparams() == whole.qparams()


def test_merging_into_and_from_an_empty_observer():
    for cls in (MinMaxObserver, EMAMinMaxObserver):
        spec = QuantSpec.parse("int8 channel:0")
        full, empty = cls(spec), cls(spec)
        full(torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
        before = [v.clone() for v in full.range()]
        full.merge(empty)
        assert all(torch.equal(a, b) for a, b in zip(full.range(), before, strict=True))
        empty.merge(full)
        assert all(torch.equal(a, b) for a, b in zip(empty.range(), before, strict=True))
        assert (empty.batches, empty.param_shape) == (1, (2,))
        with pytest.raises(CalibrationError, match=r"shape changed: \(2,\) channels before, now \(3,\)"):
            empty(torch.ones(3, 2))


def test_merging_different_kinds_is_refused():
    spec = QuantSpec.parse("int8")
    with pytest.raises(
        ConfigError, match="cannot merge EMAMinMaxObserver of 'int8 symmetric tensor' into MinMaxObserver"
    ):
        MinMaxObserver(spec).merge(EMAMinMaxObserver(spec))
    with pytest.raises(ConfigError, match=r"cannot merge .* of 'uint8 affine tensor' into .* of 'int8 symm"):
        MinMaxObserver(spec).merge(MinMaxObserver(QuantSpec.parse("uint8")))


@given(batches, st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_moving_average_formula(data, ratio):
    observer = EMAMinMaxObserver(QuantSpec.parse("uint8"), ema_ratio=ratio)
    low = high = None
    for batch in data:
        observer(torch.tensor(batch))
        if low is None:
            low, high = min(batch), max(batch)
        else:
            low = ratio * low + (1 - ratio) * min(batch)
            high = ratio * high + (1 - ratio) * max(batch)
    assert [float(v) for v in observer.range()] == pytest.approx([low, high], rel=1e-4, abs=1e-4)


def test_merging_moving_averages_appends_the_batches():
    one, other = (EMAMinMaxObserver(QuantSpec.parse("uint8"), ema_ratio=0.5) for _ in range(2))
    one(torch.tensor([0.0, 4.0]))
    for top in (8.0, 16.0):
        other(torch.tensor([-8.0, top]))
    one.merge(other)
    assert [float(v) for v in one.range()] == [-6.0, 11.0]  # 4, then 4/2 + 8/2 = 6, then 6/2 + 16/2
    assert one.batches == 3


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 2.0])
def test_a_ratio_outside_of_its_range_is_refused(ratio):
    with pytest.raises(ConfigError, match=f"ema_ratio must be at least 0 and below 1, not {ratio}"):
        EMAMinMaxObserver(QuantSpec.parse("int8"), ema_ratio=ratio)


def test_reset_forgets_what_was_seen_and_keeps_the_settings():
    observer = EMAMinMaxObserver(QuantSpec.parse("int8 channel:0"), ema_ratio=0.25)
    observer(torch.randn(3, 2))
    observer.reset()
    assert (observer.batches, observer.param_shape, observer.ema_ratio) == (0, None, 0.25)
    observer(torch.zeros(5, 2))
    assert observer.range()[0].shape == (5,)


def test_qparams_follow_from_the_range():
    observer = MinMaxObserver(QuantSpec.parse("uint8"))
    observer(torch.tensor([-1.0, 3.0]))
    expected = scale_and_zero_point(torch.tensor(-1.0), torch.tensor(3.0), observer.spec)
    assert observer.qparams() == expected


@pytest.mark.parametrize("cls", [MinMaxObserver, EMAMinMaxObserver])
def test_bad_data(cls):
    observer = cls(QuantSpec.parse("int8 channel:1"))
    with pytest.raises(CalibrationError, match="no data was seen"):
        observer.qparams()
    with pytest.raises(RuntimeError, match=r"range\(\) before the first observe\(\)"):
        observer.range()
    observer(torch.empty(0, 3))
    with pytest.raises(CalibrationError, match="no data was seen"):
        observer.qparams()
    observer(torch.randn(2, 3))
    with pytest.raises(CalibrationError, match=r"shape changed: \(3,\) channels before, now \(4,\) for .* \(2, 4\)"):
        observer(torch.randn(2, 4))
    with pytest.raises(ConfigError, match=r"axis 1 of spec .* out of range for a tensor of shape \(3,\)"):
        observer(torch.randn(3))
    for value in (float("nan"), float("inf"), -float("inf")):
        observer.reset()
        observer(torch.tensor([[1.0, value, 2.0]]))
        with pytest.raises(CalibrationError, match="NaN or infinity was seen"):
            observer.qparams()


def test_no_tensor_is_kept_and_no_graph_built():
    observer = MinMaxObserver(QuantSpec.parse("int8 channel:0"))
    x = torch.randn(2, 500, requires_grad=True)
    observer(x * 2)
    kept = [v for v in vars(observer).values() if isinstance(v, torch.Tensor)]
    assert sum(v.numel() for v in kept) == 4
    assert sum(v.untyped_storage().nbytes() for v in kept) == 16
    assert not any(v.requires_grad for v in kept)


def test_an_observer_is_one_class_with_one_decorator():
    @register_observer("HalfRangeObserver", aliases=("half",))
    class HalfRange(MinMaxObserver):
        def range(self):
            return tuple(v / 2 for v in super().range())

    try:
        assert OBSERVERS.get("half") is HalfRange
        with pytest.raises(UnknownNameError, match="did you mean 'HalfRangeObserver'"):
            OBSERVERS.get("HalfRangeObserve")
        observer = HalfRange(QuantSpec.parse("int8"))
        observer(torch.tensor([-4.0, 2.0]))
        assert [float(v) for v in observer.range()] == [-2.0, 1.0]
    finally:
        OBSERVERS.unregister("half")
    assert "HalfRangeObserver" not in OBSERVERS


def test_names():
    assert OBSERVERS.get("minmax") is OBSERVERS.get("MinMaxObserver") is MinMaxObserver
    assert OBSERVERS.get("ema_minmax") is EMAMinMaxObserver
    assert {"MinMaxObserver", "EMAMinMaxObserver"} <= set(OBSERVERS)
    assert all(issubclass(OBSERVERS.get(name), Observer) for name in OBSERVERS)
    with pytest.raises(UnknownNameError, match="unknown observer 'EMAMinMax': did you mean 'EMAMinMaxObserver'"):
        OBSERVERS.get("EMAMinMax")
