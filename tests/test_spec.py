"""QuantSpec: text and back, what is refused and with which words, shapes of parameters."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwright.errors import BitwrightError, ConfigError, UnknownNameError
from bitwright.spec import NumberFormat, PerChannel, PerGroup, PerTensor, QuantSpec

FORMATS = [f"int{b}" for b in range(2, 17)] + [f"uint{b}" for b in range(1, 17)]


@st.composite
def specs(draw):
    number = NumberFormat(draw(st.sampled_from(FORMATS)))
    axis = st.integers(-4, 3)
    return QuantSpec(
        number,
        symmetric=draw(st.booleans()),
        narrow=number.signed and draw(st.booleans()),
        power_of_two=draw(st.booleans()),
        granularity=draw(
            st.one_of(
                st.just(PerTensor()),
                st.builds(PerChannel, axis),
                st.builds(PerGroup, st.integers(1, 256), axis),
            )
        ),
    )


@given(specs())
def test_text_round_trip(spec):
    again = QuantSpec.parse(str(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    assert str(again) == str(spec)


@given(specs())
def test_integer_range(spec):
    count = spec.qmax - spec.qmin + 1
    assert count == 2**spec.bits - spec.narrow
    assert spec.qmin <= 0 <= spec.qmax
    if spec.narrow:
        assert spec.qmin == -spec.qmax
    limits = torch.iinfo(spec.format.storage)
    assert limits.min <= spec.qmin
    assert limits.max >= spec.qmax


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("int8", "int8 symmetric tensor"),
        ("uint8", "uint8 affine tensor"),
        ("uint4 symmetric", "uint4 symmetric tensor"),
        ("int8 affine", "int8 affine tensor"),
        ("int8 channel", "int8 symmetric channel:0"),
        ("  int4   group:32  narrow ", "int4 symmetric narrow group:32:-1"),
        ("int4 pot group:32:0", "int4 symmetric pot group:32:0"),
        ("uint16 channel:-1", "uint16 affine channel:-1"),
    ],
)
def test_defaults_of_text(text, printed):
    assert str(QuantSpec.parse(text)) == printed


@pytest.mark.parametrize(
    ("name", "low", "high", "storage"),
    [
        ("int8", -128, 127, torch.int8),
        ("int2", -2, 1, torch.int8),
        ("uint1", 0, 1, torch.uint8),
        ("uint8", 0, 255, torch.uint8),
        ("int9", -256, 255, torch.int16),
        ("int16", -32768, 32767, torch.int16),
        ("uint16", 0, 65535, torch.uint16),
    ],
)
def test_formats(name, low, high, storage):
    spec = QuantSpec(name)
    assert (spec.qmin, spec.qmax, spec.format.storage) == (low, high, storage)


def test_parse_takes_a_spec():
    spec = QuantSpec.parse("int4 narrow")
    assert QuantSpec.parse(spec) is spec


def test_a_spec_is_frozen_and_changed_by_copy():
    spec = QuantSpec.parse("int8 narrow channel:0")
    assert spec.qmin == -127
    wider = spec.with_(narrow=False)
    assert (wider.qmin, spec.qmin) == (-128, -127)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.narrow = False


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("int32", UnknownNameError, "unknown number format 'int32': did you mean 'int3'"),
        ("itn8", UnknownNameError, "unknown number format 'itn8': did you mean 'int8'"),
        ("int1", UnknownNameError, "unknown number format 'int1': did you mean 'uint1'"),
        ("int08", UnknownNameError, "unknown number format 'int08': did you mean 'int8'"),
        ("uint0", UnknownNameError, "unknown number format 'uint0'"),
        ("zzz", UnknownNameError, "known are int10, int11"),
        (
            "int8 symetric",
            UnknownNameError,
            "unknown word 'symetric' in the spec .* did you mean 'symmetric'",
        ),
        ("int8 chanel:0", UnknownNameError, "unknown word 'chanel:0' .* did you mean 'channel:0'"),
        ("int8 symmetric affine", ConfigError, "has both symmetric and affine"),
        ("int8 tensor channel:0", ConfigError, "names more than one granularity: tensor, channel:0"),
        ("int8 tensor:1", ConfigError, "cannot read 'tensor:1' .* write 'tensor', 'channel:AXIS' or 'group"),
        ("int8 channel:0:1", ConfigError, "cannot read 'channel:0:1'"),
        ("int8 group", ConfigError, "cannot read 'group'"),
        ("int8 group:0", ConfigError, "a group holds at least 1 value, not 0"),
        ("uint8 narrow", ConfigError, "narrow range is only for signed formats, not for uint8"),
        ("", ConfigError, "a spec must be text like 'int8 symmetric channel:0', not ''"),
        (8, ConfigError, "a spec must be text like 'int8 symmetric channel:0', not 8"),
    ],
)
def test_refusals(text, error, message):
    with pytest.raises(error, match=message) as caught:
        QuantSpec.parse(text)
    assert isinstance(caught.value, BitwrightError)
    assert isinstance(caught.value, ValueError)


def test_wrong_field_types_are_refused():
    with pytest.raises(ConfigError, match="format must be a NumberFormat or a name like 'int8', not 8"):
        QuantSpec(8)
    with pytest.raises(ConfigError, match="granularity must be PerTensor, PerChannel or PerGroup, not 'tensor'"):
        QuantSpec("int8", granularity="tensor")


@pytest.mark.parametrize(
    ("grain", "shape", "expected"),
    [
        ("tensor", (64, 3, 7, 7), ()),
        ("tensor", (), ()),
        ("channel:0", (64, 3, 7, 7), (64,)),
        ("channel:-1", (64, 3, 7, 5), (5,)),
        ("channel:1", (0, 3), (3,)),
        ("group:128:1", (512, 1024), (512, 8)),
        ("group:4:0", (8, 3, 5), (2, 3, 5)),
        ("group:5:-1", (8, 3, 5), (8, 3, 1)),
    ],
)
def test_shape_of_parameters(grain, shape, expected):
    assert QuantSpec.parse(f"int8 {grain}").param_shape(shape) == expected


@pytest.mark.parametrize(
    ("grain", "shape", "message"),
    [
        ("channel:2", (4, 4), r"axis 2 of spec 'int8 symmetric channel:2' is out of range .* shape \(4, 4\)"),
        ("channel:0", (), r"axis 0 .* out of range for a tensor of shape \(\)"),
        (
            "group:100:1",
            (4, 96),
            "groups of 100 do not divide the 96 values along axis 1 .* such as 96 would",
        ),
        ("group:7:-1", (4, 96), "groups of 7 .* a divisor such as 6 would"),
    ],
)
def test_shapes_that_do_not_fit(grain, shape, message):
    with pytest.raises(ConfigError, match=message):
        QuantSpec.parse(f"int8 {grain}").param_shape(shape)
