"""QuantDescriptor: how a tensor is to be quantized, in one value."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.numerics.fp8 import BY_BITS
from bitwright.spec import MAX_BITS, MIN_BITS, NumberFormat, PerChannel, PerTensor, QuantSpec

CALIB_METHODS = ("max", "histogram")


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class QuantDescriptor:
    """A frozen, comparable, printable description that a :class:`TensorQuantizer` is built from.

    Args:
        num_bits: bits of an integer, or (exponent, mantissa) of an fp8 format: (4, 3) or (5, 2).
        name: a name for people.
        fake_quant: give floats on the grid; False gives the integers themselves.
        axis: the axes that keep a range of their own, as in a weight's channels; None is one range for the tensor.
        amax: the largest magnitude, where it is known: a number, a list or an array.
        learn_amax: make the range's ends Parameters.
        scale_amax: a factor for every amax.
        calib_method: how calibration finds amax, ``"max"`` or ``"histogram"``.
        unsigned: integers from 0.
        narrow_range: leave out the lowest integer of a signed format.
    """

    num_bits: int | tuple[int, int] = 8
    name: str | None = None
    fake_quant: bool = True
    axis: int | tuple[int, ...] | None = None
    amax: np.ndarray | None = None
    learn_amax: bool = False
    scale_amax: float | None = None
    calib_method: str = "max"
    unsigned: bool = False
    narrow_range: bool = False

    def __init__(
        self,
        num_bits: int | Sequence[int] = 8,
        name: str | None = None,
        fake_quant: bool = True,
        axis: int | Iterable[int] | None = None,
        amax: float | Sequence[Any] | np.ndarray | torch.Tensor | None = None,
        learn_amax: bool = False,
        scale_amax: float | None = None,
        calib_method: str = "max",
        unsigned: bool = False,
        narrow_range: bool = False,
        **unknown: object,
    ) -> None:
        if unknown:
            known = [f.name for f in dataclasses.fields(self)]
            told = "; ".join(f"{key!r}{suggest(key, known)}" for key in unknown)
            raise TypeError(f"Unused keys: a QuantDescriptor has no {told}")
        flags = {"fake_quant": fake_quant, "learn_amax": learn_amax, "unsigned": unsigned, "narrow_range": narrow_range}
        for key, flag in flags.items():
            if not isinstance(flag, bool | np.bool_):
                raise TypeError(f"{key} must be True or False, not {flag!r}")
        values = {
            **{key: bool(flag) for key, flag in flags.items()},
            "num_bits": _bits(num_bits),
            "name": _name(name),
            "axis": _axis(axis),
            "amax": None if amax is None else _amax(amax),
            "scale_amax": None if scale_amax is None else _factor(scale_amax),
            "calib_method": _calib_method(calib_method),
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)
        self._check_together()

    def _check_together(self) -> None:
        if self.learn_amax and self.axis is not None:
            raise TypeError(f"axis is ignored and must be None when learn_amax is true, got {self.axis!r}")
        if self.learn_amax and self.amax is not None and self.amax.size != 1:
            raise TypeError("amax must be a single number when learn_amax is true")
        if not isinstance(self.num_bits, int):
            if self.unsigned:
                raise ConfigError(f"num_bits {self.num_bits} is a signed format: unsigned must be False")
            if not self.fake_quant:
                raise ConfigError(f"num_bits {self.num_bits} has no integers: fake_quant must be True")

    @property
    def spec(self) -> QuantSpec:
        """The same as a :class:`QuantSpec`; ranges along several axes at once have none."""
        if isinstance(self.num_bits, tuple):
            number, narrow = NumberFormat(f"e{self.num_bits[0]}m{self.num_bits[1]}"), False
        else:
            lowest = MIN_BITS if self.unsigned else MIN_BITS + 1
            if not lowest <= self.num_bits <= MAX_BITS:
                kind = "an unsigned" if self.unsigned else "a signed"
                raise ConfigError(
                    f"num_bits must be >= {lowest} and <= {MAX_BITS} for {kind} format, not {self.num_bits}"
                )
            number = NumberFormat(f"{'u' if self.unsigned else ''}int{self.num_bits}")
            narrow = self.narrow_range and not self.unsigned
        axes = self.axes
        if len(axes) > 1:
            raise ConfigError(f"axis {self.axis} keeps ranges along several axes, but a spec has at most one")
        return QuantSpec(number, narrow=narrow, granularity=PerChannel(axes[0]) if axes else PerTensor())

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that keep a range of their own."""
        return () if self.axis is None else (self.axis,) if isinstance(self.axis, int) else self.axis

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantDescriptor) and self.dict() == other.dict()

    def __hash__(self) -> int:
        return hash(str(self.dict()))

    def with_(self, **changes: Any) -> "QuantDescriptor":
        """Return a copy with some fields changed."""
        return QuantDescriptor(**{**self.dict(), **changes})

    def dict(self) -> dict[str, Any]:
        """Every field by name, amax as plain numbers; ``QuantDescriptor(**d.dict()) == d``."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "amax": None if self.amax is None else self.amax.tolist()}

    def to_yaml(self) -> str:
        """Every field as YAML."""
        import yaml

        return yaml.safe_dump(self.dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> "QuantDescriptor":
        """Read what :meth:`to_yaml` wrote."""
        import yaml

        try:
            fields = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"this is not YAML: {str(error).splitlines()[0]}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"a descriptor in YAML must be a mapping of fields, not {fields!r}")
        return cls(**{str(key): value for key, value in fields.items()})

    def __str__(self) -> str:
        words = [f"{self.name}:"] * (self.name is not None) + ["unsigned"] * self.unsigned
        words += [f"{self.num_bits}bit" if isinstance(self.num_bits, int) else f"fp8{self.num_bits}"]
        words += ["narrow"] * self.narrow_range + ["fake" if self.fake_quant else "real"]
        words += ["per-tensor" if self.axis is None else f"axis={self.axis}"]
        words += [f"amax={self.dict()['amax']}"] * (self.amax is not None) + [f"*{self.scale_amax}"] * (
            self.scale_amax is not None
        )
        return " ".join([*words, *["learned"] * self.learn_amax, self.calib_method])


def _bits(given: object) -> int | tuple[int, int]:
    if isinstance(given, tuple | list):
        if tuple(given) not in BY_BITS:
            raise TypeError(f"num_bits of fp8 must be (4, 3) or (5, 2), not {tuple(given)}")
        return (int(given[0]), int(given[1]))
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        raise TypeError(f"num_bits must be an integer, or (4, 3) or (5, 2) for fp8, not {given!r}")
    if given < 0:
        raise ConfigError(f"num_bits must be 0 or more, not {given}")
    return int(given)


def _name(given: object) -> str | None:
    if given is not None and not isinstance(given, str):
        raise TypeError(f"name must be a string or None, not {given!r}")
    return given


def _axis(given: Any) -> int | tuple[int, ...] | None:  # noqa: ANN401
    several = list(given) if isinstance(given, tuple | list) else [] if given is None else [given]
    if not all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in several):
        raise TypeError(f"axis must be None, an integer or several, not {given!r}")
    if len(set(several)) != len(several):
        raise ConfigError(f"axis {tuple(given)} has an axis twice")
    axes = tuple(int(a) for a in several)
    return (axes or None) if isinstance(given, tuple | list) else next(iter(axes), None)


def _amax(given: object) -> np.ndarray:
    try:
        array = np.array(given.tolist() if isinstance(given, torch.Tensor) else given, dtype=np.float32)
    except (TypeError, ValueError):
        raise TypeError(f"amax must be float, list or ndarray, not {given!r}") from None
    if not array.size or not np.isfinite(array).all():
        raise ConfigError(f"amax must be finite and not empty, not {given!r}")
    if (array < 0).any():
        raise ConfigError(f"Negative values in amax: the lowest is {array.min():.4g}, it must be 0 or more")
    array.setflags(write=False)
    return array


def _factor(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float | np.number):
        raise TypeError(f"scale_amax must be a number, not {given!r}")
    if not 0 < float(given) < float("inf"):
        raise ConfigError(f"scale_amax must be positive and finite, not {given!r}")
    return float(given)


def _calib_method(given: str) -> str:
    if given not in CALIB_METHODS:
        raise UnknownNameError(f"unknown calib_method {given!r}{suggest(str(given), CALIB_METHODS)}")
    return given
