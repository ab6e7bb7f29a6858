"""QuantDescriptor: a value that is checked, compared, printed, and survives YAML."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.errors import ConfigError, UnknownNameError
from bitwright.quantizer import QuantDescriptor
from bitwright.spec import QuantSpec

MAGNITUDE = st.floats(0, 1e6, width=32)


@st.composite
def descriptors(draw):
    fp8 = draw(st.booleans())
    learned = draw(st.booleans())
    return QuantDescriptor(
        num_bits=draw(st.sampled_from([(4, 3), (5, 2)])) if fp8 else draw(st.integers(2, 16)),
        name=draw(st.none() | st.text()),
        fake_quant=fp8 or draw(st.booleans()),
        axis=None if learned else draw(st.none() | st.integers(-3, 3) | st.just((0, 2))),
        amax=draw(st.none() | MAGNITUDE | (st.nothing() if learned else st.lists(MAGNITUDE, min_size=1, max_size=3))),
        learn_amax=learned,
        scale_amax=draw(st.none() | st.floats(0.1, 10)),
        calib_method=draw(st.sampled_from(["max", "histogram"])),
        unsigned=not fp8 and draw(st.booleans()),
        narrow_range=draw(st.booleans()),
    )


@settings(max_examples=80, deadline=None)
@given(descriptors())
def test_round_trips_lose_nothing(descriptor):
    for twin in (QuantDescriptor(**descriptor.dict()), QuantDescriptor.from_yaml(descriptor.to_yaml())):
        assert twin == descriptor
        assert hash(twin) == hash(descriptor)
        assert twin.dict() == descriptor.dict()


def test_defaults():
    assert QuantDescriptor().dict() == {
        "num_bits": 8,
        "name": None,
        "fake_quant": True,
        "axis": None,
        "amax": None,
        "learn_amax": False,
        "scale_amax": None,
        "calib_method": "max",
        "unsigned": False,
        "narrow_range": False,
    }


def test_it_is_a_value():
    one = QuantDescriptor(num_bits=4, axis=0)
    assert one == QuantDescriptor(4, axis=0)
    assert one != QuantDescriptor(4, axis=1)
    assert one != QuantDescriptor(4, axis=0, calib_method="histogram")
    assert one.with_(axis=1) == QuantDescriptor(4, axis=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.num_bits = 8


@pytest.mark.parametrize(
    ("given_amax", "kept"),
    [
        (1, 1.0),
        (0.1, float(np.float32(0.1))),
        ([1.0, 2.5], [1.0, 2.5]),
        (np.array([[1.0], [2.0]]), [[1.0], [2.0]]),
        (torch.tensor(3.0), 3.0),
        (np.float64(0.5), 0.5),
    ],
)
def test_amax_of_every_kind(given_amax, kept):
    amax = QuantDescriptor(amax=given_amax).amax
    assert (type(amax), amax.dtype, amax.tolist()) == (np.ndarray, np.float32, kept)
    with pytest.raises(ValueError, match="read-only"):
        amax[...] = 0


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({}, "int8 symmetric tensor"),
        ({"num_bits": 4, "axis": 1, "narrow_range": True}, "int4 symmetric narrow channel:1"),
        ({"unsigned": True}, "uint8 symmetric tensor"),
        ({"unsigned": True, "narrow_range": True}, "uint8 symmetric tensor"),
        ({"num_bits": (4, 3)}, "e4m3 symmetric tensor"),
        ({"num_bits": [5, 2], "axis": (0,)}, "e5m2 symmetric channel:0"),
    ],
)
def test_as_a_spec(fields, spec):
    assert str(QuantDescriptor(**fields).spec) == spec
    assert QuantSpec.parse(spec) == QuantDescriptor(**fields).spec


def test_fp8_specs():
    spec = QuantSpec.parse("e4m3")
    assert (spec.qmin, spec.qmax, spec.bits, spec.format.storage) == (-448, 448, 8, torch.float8_e4m3fn)
    assert QuantSpec.parse("e5m2").qmax == 57344
    with pytest.raises(ConfigError, match="e4m3 is symmetric and has no narrow range"):
        QuantSpec.parse("e4m3 affine")
    with pytest.raises(UnknownNameError, match=r"unknown number format 'e4m2': did you mean .*'e4m3'"):
        QuantSpec.parse("e4m2")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"numbits": 8}, TypeError, "Unused keys: a QuantDescriptor has no 'numbits': did you mean 'num_bits'"),
        ({"axes": 0, "amx": 1}, TypeError, "'axes': did you mean 'axis'.*; 'amx': did you mean 'amax'"),
        ({"num_bits": "8"}, TypeError, r"num_bits must be an integer, or \(4, 3\) or \(5, 2\) for fp8, not '8'"),
        ({"num_bits": True}, TypeError, "num_bits must be an integer"),
        ({"num_bits": -1}, ValueError, "num_bits must be 0 or more, not -1"),
        ({"name": 3}, TypeError, "name must be a string or None, not 3"),
        ({"num_bits": (3, 4)}, TypeError, r"num_bits of fp8 must be \(4, 3\) or \(5, 2\), not \(3, 4\)"),
        ({"num_bits": (4, 3), "unsigned": True}, ConfigError, r"\(4, 3\) is a signed format: unsigned must be False"),
        ({"num_bits": (4, 3), "fake_quant": False}, ConfigError, r"\(4, 3\) has no integers: fake_quant must be True"),
        ({"axis": 1.5}, TypeError, "axis must be None, an integer or several, not 1.5"),
        ({"axis": (0, 0)}, ConfigError, r"axis \(0, 0\) has an axis twice"),
        ({"amax": -1.0}, ValueError, "Negative values in amax: the lowest is -1"),
        ({"amax": [1.0, float("nan")]}, ConfigError, "amax must be finite and not empty"),
        ({"amax": []}, ConfigError, "amax must be finite and not empty"),
        ({"amax": "big"}, TypeError, "amax must be float, list or ndarray, not 'big'"),
        ({"amax": [[1.0], [1.0, 2.0]]}, TypeError, "amax must be float, list or ndarray"),
        ({"learn_amax": True, "axis": 0}, TypeError, "axis is ignored and must be None when learn_amax is true, got 0"),
        ({"learn_amax": True, "amax": [1.0, 2.0]}, TypeError, "amax must be a single number when learn_amax is true"),
        ({"learn_amax": 1}, TypeError, "learn_amax must be True or False, not 1"),
        ({"scale_amax": 0}, ConfigError, "scale_amax must be positive and finite, not 0"),
        ({"scale_amax": "2"}, TypeError, "scale_amax must be a number, not '2'"),
        ({"calib_method": "maximum"}, UnknownNameError, "unknown calib_method 'maximum': did you mean 'max'"),
    ],
)
def test_refusals(fields, error, message):
    with pytest.raises(error, match=message):
        QuantDescriptor(**fields)


def test_yaml_refusals():
    with pytest.raises(ConfigError, match=r"a descriptor in YAML must be a mapping of fields, not \[1, 2\]"):
        QuantDescriptor.from_yaml("[1, 2]")
    with pytest.raises(ConfigError, match="this is not YAML"):
        QuantDescriptor.from_yaml("{a: [")
    with pytest.raises(TypeError, match="has no 'bits'"):
        QuantDescriptor.from_yaml("bits: 8")
    with pytest.raises(ConfigError, match=r"axis \(0, 1\) keeps ranges along several axes, but a spec has at most one"):
        _ = QuantDescriptor(axis=(0, 1)).spec


def test_what_it_prints():
    assert str(QuantDescriptor()) == "8bit fake per-tensor max"
    described = QuantDescriptor(4, "w", axis=0, unsigned=True, amax=[1, 2], scale_amax=0.5, calib_method="histogram")
    assert str(described) == "w: unsigned 4bit fake axis=0 amax=[1.0, 2.0] *0.5 histogram"
    assert "num_bits=(4, 3)" in repr(QuantDescriptor((4, 3)))


@pytest.mark.parametrize(("bits", "unsigned", "lowest"), [(0, False, 2), (1, False, 2), (0, True, 1), (17, False, 2)])
def test_bits_that_no_format_has_are_described_but_not_quantized(bits, unsigned, lowest):
    described = QuantDescriptor(num_bits=bits, unsigned=unsigned)
    assert described.num_bits == bits
    with pytest.raises(
        ConfigError, match=f"num_bits must be >= {lowest} and <= 16 for an? .*signed format, not {bits}"
    ):
        str(described.spec)
