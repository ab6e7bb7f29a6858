"""What an observer keeps travels as named tensors: into a file, to another process, into another observer."""

import pytest
import torch
from safetensors.torch import load, save

from bitwright.errors import ConfigError
from bitwright.observers import OBSERVERS, Observer
from bitwright.quantizer.calibrators import HistogramCalibrator, MaxCalibrator
from bitwright.spec import QuantSpec

SPECS = ["int8", "uint4", "int4 channel:0", "int4 group:64:1"]
OWN = [n for n in OBSERVERS.names() if OBSERVERS.get(n).__module__.startswith("bitwright.")]


def batches(count: int, size: int = 64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(6, size) * (i + 1) for i in range(count)]


def through_a_file(observer: Observer, fresh: Observer) -> Observer:
    fresh.load_state_tensors(load(save(observer.state_tensors())))
    return fresh


def same(one: Observer, other: Observer) -> bool:
    assert one.batches == other.batches
    assert one.param_shape == other.param_shape
    return all(torch.equal(a, b) for a, b in zip(one.qparams(), other.qparams(), strict=True))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", OWN)
def test_a_loaded_observer_goes_on_as_the_saved_one(name, spec):
    make = OBSERVERS.get(name)
    for size in (64, 8192):  # observers keep few values, and count many
        observer = make(QuantSpec.parse(spec))
        for x in batches(2, size):
            observer(x)
        copy = through_a_file(observer, make(QuantSpec.parse(spec)))
        assert same(copy, observer)
        before = copy.state_tensors()
        observer(batches(3, size)[2])
        assert all(torch.equal(v, before[k]) for k, v in copy.state_tensors().items())  # no memory is shared
        copy(batches(3, size)[2])
        assert same(copy, observer)


@pytest.mark.parametrize("name", OWN)
def test_loaded_parts_merge_to_the_whole(name):
    make, spec = OBSERVERS.get(name), QuantSpec.parse("uint4 channel:0")
    whole, parts = make(spec), [make(spec), make(spec), make(spec)]  # the last sees nothing
    for part, x in zip(parts, batches(2), strict=False):
        whole(x)
        part(x)
    merged = make(spec)
    for part in parts:
        merged.merge(through_a_file(part, make(spec)))
    assert merged.batches == whole.batches == 2
    for found, wanted in zip(merged.range(), whole.range(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [MaxCalibrator, HistogramCalibrator])
def test_calibrators_travel_too(make):
    calibrator = make()
    for x in batches(2):
        calibrator.collect(x)
    assert torch.equal(through_a_file(calibrator, make()).compute_amax(), calibrator.compute_amax())


def test_another_kind_is_refused():
    spec = QuantSpec.parse("int8")
    one, other = OBSERVERS.get("minmax")(spec), OBSERVERS.get("mse")(spec)
    other(torch.ones(3))
    with pytest.raises(
        ConfigError, match=r"MinMaxObserver keeps batches, hi, lo, param_shape, but the state has .*histogram.hi"
    ):
        one.load_state_tensors(other.state_tensors())
    with pytest.raises(ConfigError, match="but the state has nothing"):
        one.load_state_tensors({})


def test_an_observer_that_does_not_say_what_it_keeps():
    class Silent(OBSERVERS.get("minmax")):
        kept = ()

        def absorb(self, other):
            return Observer.absorb(self, other)

    one, other = (Silent(QuantSpec.parse("int8")) for _ in range(2))
    with pytest.raises(ConfigError, match="Silent does not define what it keeps: name its tensors in `kept`"):
        one.state_tensors()
    other(torch.ones(2))
    with pytest.raises(ConfigError, match=r"Silent cannot be merged: write absorb\(other\)"):
        one.merge(other)
