"""MagnitudeObserver: every choice against a plain formula, and its options."""

import pytest
import torch

from bitwright.errors import CalibrationError, ConfigError, UnknownNameError
from bitwright.observers.kl import KLObserver
from bitwright.observers.magnitude import MagnitudeObserver
from bitwright.spec import QuantSpec

INT8 = QuantSpec.parse("int8 narrow")


def observed(x, spec=INT8, **options):
    observer = MagnitudeObserver(spec, **options)
    for batch in x.split(max(1, len(x) // 3)):
        observer(batch)
    return observer


def data(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [3_000, 60_000], ids=["kept", "binned"])
@pytest.mark.parametrize("percentile", [0.0, 10.0, 50.0, 99.0, 99.99, 100.0])
def test_percentile_of_magnitudes(percentile, count):
    x = data(count)
    lo, hi = observed(x, choice="percentile", percentile=percentile).range()
    assert float(hi) == pytest.approx(float(x.abs().double().quantile(percentile / 100)), abs=2e-3)
    assert lo == -hi


@pytest.mark.parametrize("count", [3_000, 60_000], ids=["kept", "binned"])
@pytest.mark.parametrize("spec", ["int4 narrow", "uint8 symmetric", "e4m3"])
def test_mse_is_the_best_threshold_tried(spec, count):
    spec, x = QuantSpec.parse(spec), data(count).abs() ** 2
    observer = observed(x, spec, choice="mse", num_bins=200, start_bin=20, stride=3)
    tops = [float(x.max()) * (i + 0.5) / 200 for i in range(20, 200, 3)] + [float(x.max())]

    def cost(top):
        step = top / spec.qmax if not spec.format.floating else top / 448
        y = x.double() / step
        y = y.to(torch.float8_e4m3fn).double() if spec.format.floating else y.round().clamp(0, spec.qmax)
        return float((y * step - x).square().sum())

    found = float(observer.range()[1])
    assert min(abs(found - top) for top in tops) < 1e-5 * found
    assert cost(found) <= 1.01 * min(map(cost, tops))


def test_entropy_is_that_of_the_kl_observer():
    x = data(60_000) ** 3
    other = KLObserver(INT8, bins=8192)
    other(x)
    observer = observed(x, start_bin=1)
    assert torch.equal(observer.range()[1], other.range()[1])
    assert torch.equal(observer.largest("entropy", start_bin=1), observer.range()[1].reshape(1))
    coarse = observer.largest("entropy", start_bin=1, stride=16)
    assert float(coarse) == pytest.approx(float(observer.range()[1]), rel=0.25)


def test_no_threshold_lies_below_the_first_bin():
    x, spec = torch.cat([data(50_000) * 0.05, torch.ones(1)]), QuantSpec.parse("int4 narrow")
    for choice in ("entropy", "mse"):
        free, bound = (observed(x, spec, choice=choice, start_bin=start).range()[1] for start in (1, 1024))
        assert free < 0.3
        assert 0.5 <= float(bound) <= 1


def test_channels_have_thresholds_of_their_own():
    x = torch.stack([data(5_000), data(5_000, 1) * 100])
    for choice in ("entropy", "mse", "percentile"):
        together = MagnitudeObserver(QuantSpec.parse("int8 narrow channel:0"), choice=choice)
        together(x)
        for row, top in zip(x, together.range()[1], strict=True):
            assert float(top) == pytest.approx(float(observed(row, choice=choice).range()[1]), rel=1e-5)


def test_zeros():
    x = torch.cat([torch.zeros(90), torch.ones(10)])
    assert float(observed(x, choice="percentile", percentile=89).range()[1]) == 0
    assert float(observed(x, choice="percentile", percentile=5, skip_zeros=True).range()[1]) == 1
    with pytest.raises(CalibrationError, match="no data was seen"):
        observed(torch.zeros(9), skip_zeros=True).qparams()
    assert float(observed(torch.zeros(9), choice="entropy").range()[1]) == 0


def test_options_are_checked():
    with pytest.raises(UnknownNameError, match="Unknown calibration method 'entropi': did you mean 'entropy'"):
        MagnitudeObserver(INT8, choice="entropi")
    with pytest.raises(ConfigError, match="stride and start_bin must be at least 1, not 0 and 128"):
        MagnitudeObserver(INT8, stride=0)
    with pytest.raises(ConfigError, match=r"a histogram needs at least 1 bin and at most 2..17, not 0"):
        MagnitudeObserver(INT8, num_bins=0)
    with pytest.raises(ConfigError, match="Must be in range 0 <= percentile <= 100, not 101"):
        MagnitudeObserver(INT8, percentile=101)
    with pytest.raises(ConfigError, match="skip_zeros is for one range per tensor, not for 'int8 symmetric channel:0'"):
        MagnitudeObserver(QuantSpec.parse("int8 channel:0"), skip_zeros=True)
    with pytest.raises(ConfigError, match="entropy needs integers, and 'e4m3"):
        MagnitudeObserver(QuantSpec.parse("e4m3"))
