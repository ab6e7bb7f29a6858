"""Settings: the options of reconstruct, checked in one place."""

import math
from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

from bitwright.errors import ConfigError, suggest

MethodName = Literal["adaround", "brecq", "qdrop"]
UnitKind = Literal["layer", "block", "auto"]
LossName = Literal["mse", "fisher"]


@dataclass(frozen=True)
class Settings:
    """How units are found and learned; see :func:`bitwright.reconstruct`."""

    method: MethodName = "qdrop"
    unit: UnitKind = "auto"
    loss: LossName = "mse"
    steps: int = 1000
    batch_size: int = 32
    lr: float = 1e-2
    scale_lr: float = 1e-3
    warmup: float = 0.2
    beta: tuple[float, float] = (20.0, 2.0)
    rounding_weight: float = 3.0
    keep: float | None = None
    merge: int = 1
    prediction: float = 0.0
    temperature: float = 1.0
    weight_scale_lr: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("method", MethodName), ("unit", UnitKind), ("loss", LossName)):
            value = getattr(self, name)
            if value not in get_args(known):
                raise ConfigError(f"reconstruct: {name} cannot be {value!r}{suggest(str(value), get_args(known))}")
        for name, lowest, highest in _LIMITS:
            if (name, getattr(self, name)) != ("keep", None):
                _check_number(name, getattr(self, name), lowest, highest)
        for name in ("steps", "batch_size", "merge", "seed"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"reconstruct: {name} must be a whole number, not {getattr(self, name)!r}")
        _check_beta(self.beta)

    @property
    def unit_kind(self) -> str:
        """Layers for AdaRound and blocks for the others, unless the user chooses."""
        if self.unit != "auto":
            return self.unit
        return "layer" if self.method == "adaround" else "block"

    def keep_at(self, bits: int) -> float:
        """The probability that activations are quantized in a unit, given the fewest bits that any of them has.

        Randomness makes coarse activations robust. Fine ones do not need it, and it would hide the errors of earlier
        units.
        """
        if self.method != "qdrop":
            return 1.0
        return self.keep if self.keep is not None else 0.5 if bits < 8 else 1.0

    def beta_at(self, step: int, steps: int) -> float | None:
        """The exponent of the rounding regulariser, which falls linearly; None in the warm-up."""
        begin = self.warmup * steps
        if step < begin:
            return None
        first, last = self.beta
        return last + (first - last) * max(0.0, 1.0 - (step - begin) / max(steps - begin, 1.0))

    @staticmethod
    def pressure(step: int, steps: int) -> float:
        """A factor for the regulariser, from 1/30 at the first step to 30 at the last, so that all gets decided."""
        return 30.0 ** (2.0 * step / steps - 1.0)


_MANY = float("inf")
_LIMITS = (
    ("steps", 1, _MANY),
    ("batch_size", 1, _MANY),
    ("lr", 0, _MANY),
    ("scale_lr", 0, _MANY),
    ("warmup", 0, 1),
    ("rounding_weight", 0, _MANY),
    ("keep", 0, 1),
    ("merge", 1, _MANY),
    ("prediction", 0, _MANY),
    ("temperature", 1e-3, _MANY),
    ("weight_scale_lr", 0, _MANY),
    ("seed", 0, 2**31),
)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_beta(beta: object) -> None:
    pair = tuple(beta) if isinstance(beta, tuple | list) else ()
    if len(pair) != 2 or not all(map(is_number, pair)) or not pair[0] >= pair[1] > 0:
        raise ConfigError(f"reconstruct: beta must fall from one positive number to another, not {beta!r}")


def _check_number(name: str, value: object, lowest: float, highest: float) -> None:
    if not is_number(value) or not lowest <= value <= highest:
        span = f"at least {lowest:g}" if highest == _MANY else f"from {lowest:g} to {highest:g}"
        raise ConfigError(f"reconstruct: {name} must be a number {span}, not {value!r}")
