"""QuantSpec: what a quantized tensor looks like. A frozen, validated, printable value."""

import re
from dataclasses import dataclass, field, replace

import torch

from bitwright.errors import ConfigError, UnknownNameError, suggest

MIN_BITS, MAX_BITS = 1, 16
_FP8 = {"e4m3": (torch.float8_e4m3fn, 448), "e5m2": (torch.float8_e5m2, 57344)}  # type and largest number


@dataclass(frozen=True)
class NumberFormat:
    """A number format: ``int8`` holds -128…127, ``uint4`` holds 0…15, ``e4m3`` eight-bit floats up to 448.

    Args:
        name: ``int2`` … ``int16``, ``uint1`` … ``uint16``, or fp8 ``e4m3`` and ``e5m2``.
    """

    name: str
    bits: int = field(init=False)
    signed: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.name in _FP8:
            object.__setattr__(self, "bits", 8)
            object.__setattr__(self, "signed", True)
            return
        match = re.fullmatch(r"(u?)int([1-9][0-9]?)", self.name)
        lowest = 2 if match and not match[1] else MIN_BITS
        if not match or not lowest <= int(match[2]) <= MAX_BITS:
            known = [f"int{b}" for b in range(2, MAX_BITS + 1)] + [f"uint{b}" for b in range(1, MAX_BITS + 1)]
            known += _FP8 if self.name.startswith(("e", "f")) else ()
            raise UnknownNameError(f"unknown number format {self.name!r}{suggest(self.name, known)}")
        object.__setattr__(self, "bits", int(match[2]))
        object.__setattr__(self, "signed", not match[1])

    @property
    def floating(self) -> bool:
        """Whether the numbers have an exponent (fp8): their grid is not uniform."""
        return self.name in _FP8

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and the highest number."""
        if self.floating:
            return -_FP8[self.name][1], _FP8[self.name][1]
        return (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1) if self.signed else (0, (1 << self.bits) - 1)

    @property
    def storage(self) -> torch.dtype:
        """The smallest torch dtype that holds every value."""
        if self.floating:
            return _FP8[self.name][0]
        if self.bits <= 8:
            return torch.int8 if self.signed else torch.uint8
        return torch.int16 if self.signed else torch.uint16

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor: scale has shape ()."""

    def __str__(self) -> str:
        return "tensor"


@dataclass(frozen=True)
class PerChannel:
    """One scale for each index along ``axis``: for a (64, 3, 7, 7) weight and axis 0, a scale of (64,)."""

    axis: int = 0

    def __str__(self) -> str:
        return f"channel:{self.axis}"


@dataclass(frozen=True)
class PerGroup:
    """One scale for each ``size`` values along ``axis``: for (512, 1024), size 128, axis 1: (512, 8)."""

    size: int
    axis: int = -1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a group holds at least 1 value, not {self.size}")

    def __str__(self) -> str:
        return f"group:{self.size}:{self.axis}"


Granularity = PerTensor | PerChannel | PerGroup
_GRANULARITY = re.compile(r"(tensor|channel|group)(?::(-?\d+))?(?::(-?\d+))?")
_FLAGS = {"symmetric", "affine", "narrow", "pot"}


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized.

    ``q = clamp(round(x / scale) + zero_point, qmin, qmax)`` and back ``(q - zero_point) * scale``.

    Args:
        format: the number format, or its name.
        symmetric: zero point fixed at 0.
        narrow: leave out the lowest value of a signed format (int8: -127…127).
        power_of_two: every scale is 2**k.
        granularity: one scale per tensor, per channel or per group.

    Attributes:
        qmin: the lowest integer, or number of fp8.
        qmax: the highest.

    A spec prints as text that :meth:`parse` reads back: ``int8 symmetric narrow channel:0``.
    """

    format: NumberFormat = field(default_factory=lambda: NumberFormat("int8"))
    symmetric: bool = True
    narrow: bool = False
    power_of_two: bool = False
    granularity: Granularity = field(default_factory=PerTensor)
    qmin: int = field(init=False, repr=False, compare=False)
    qmax: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.format, str):
            object.__setattr__(self, "format", NumberFormat(self.format))
        if not isinstance(self.format, NumberFormat):
            raise ConfigError(f"format must be a NumberFormat or a name like 'int8', not {self.format!r}")
        if not isinstance(self.granularity, PerTensor | PerChannel | PerGroup):
            raise ConfigError(f"granularity must be PerTensor, PerChannel or PerGroup, not {self.granularity!r}")
        if self.narrow and not self.format.signed:
            raise ConfigError(f"narrow range is only for signed formats, not for {self.format}")
        if self.format.floating and (self.narrow or not self.symmetric):
            raise ConfigError(f"{self.format} is symmetric and has no narrow range")
        lowest, highest = self.format.limits
        object.__setattr__(self, "qmin", lowest + int(self.narrow))
        object.__setattr__(self, "qmax", highest)

    @classmethod
    def parse(cls, text: "str | QuantSpec") -> "QuantSpec":
        """Read ``"uint8 affine tensor"``; only the number format is needed, the rest has defaults.

        A signed format is symmetric and an unsigned one affine unless the text says otherwise.
        """
        if isinstance(text, QuantSpec):
            return text
        if not isinstance(text, str) or not text.split():
            raise ConfigError(f"a spec must be text like 'int8 symmetric channel:0', not {text!r}")
        head, *words = text.split()
        number = NumberFormat(head)
        flags = _FLAGS.intersection(words)
        if {"symmetric", "affine"} <= flags:
            raise ConfigError(f"the spec {text!r} has both symmetric and affine")
        return cls(
            number,
            symmetric="symmetric" in flags or ("affine" not in flags and number.signed),
            narrow="narrow" in flags,
            power_of_two="pot" in flags,
            granularity=_parse_granularity([w for w in words if w not in flags], text),
        )

    @property
    def bits(self) -> int:
        """Bits of the number format."""
        return self.format.bits

    def with_(self, **changes: object) -> "QuantSpec":
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def param_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of scale and zero point for a tensor of ``shape``, or an error if it does not fit."""
        if isinstance(self.granularity, PerTensor):
            return ()
        axis = self.granularity.axis
        if not -len(shape) <= axis < len(shape):
            raise ConfigError(f"axis {axis} of spec '{self}' is out of range for a tensor of shape {shape}")
        axis %= len(shape)
        if isinstance(self.granularity, PerChannel):
            return (shape[axis],)
        size = self.granularity.size
        if shape[axis] % size:
            raise ConfigError(
                f"groups of {size} do not divide the {shape[axis]} values along axis {axis} of shape {shape};"
                f" a divisor such as {_nearest_divisor(shape[axis], size)} would"
            )
        return (*shape[:axis], shape[axis] // size, *shape[axis + 1 :])

    def __str__(self) -> str:
        words = [str(self.format), "symmetric" if self.symmetric else "affine"]
        words += ["narrow"] * self.narrow + ["pot"] * self.power_of_two
        return " ".join([*words, str(self.granularity)])


def _parse_granularity(words: list[str], text: str) -> Granularity:
    if len(words) > 1:
        raise ConfigError(f"the spec {text!r} names more than one granularity: {', '.join(words)}")
    word = words[0] if words else "tensor"
    match = _GRANULARITY.fullmatch(word)
    if not match:
        known = ["tensor", "channel:0", "group:128", *_FLAGS]
        raise UnknownNameError(f"unknown word {word!r} in the spec {text!r}{suggest(word, known)}")
    make, least, most = {"tensor": (PerTensor, 0, 0), "channel": (PerChannel, 0, 1), "group": (PerGroup, 1, 2)}[
        match[1]
    ]
    numbers = [int(number) for number in match.groups()[1:] if number is not None]
    if least <= len(numbers) <= most:
        return make(*numbers)
    raise ConfigError(f"cannot read {word!r} in the spec {text!r}: write 'tensor', 'channel:AXIS' or 'group:SIZE:AXIS'")


def _nearest_divisor(count: int, wish: int) -> int:
    return min((d for d in range(1, count + 1) if count % d == 0), key=lambda d: (abs(d - wish), d))
