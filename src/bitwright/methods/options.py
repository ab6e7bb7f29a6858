"""Check the options of methods, with readable messages."""

from collections.abc import Sequence

from torch import nn

from bitwright.errors import ConfigError, suggest
from bitwright.spec import QuantSpec

Owner = str | nn.Module  # whose option it is, or its name


def flag(owner: Owner, option: str, value: object) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"the option {option} of {_name(owner)} must be True or False, not {value!r}")
    return value


def number(owner: Owner, option: str, value: object, lowest: float, highest: float) -> float:
    """Return ``value`` if it is a number in [lowest, highest]."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest
    if not fits or not isinstance(value, int | float):
        limits = f"of at least {lowest:g}" if highest == float("inf") else f"from {lowest:g} to {highest:g}"
        raise ConfigError(f"the option {option} of {_name(owner)} must be a number {limits}, not {value!r}")
    return float(value)


def choice(owner: Owner, option: str, value: object, known: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``known``."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"the option {option} of {_name(owner)} cannot be {value!r}{suggest(str(value), known)}")
    return value


def need_symmetric(owner: Owner, spec: QuantSpec) -> None:
    """Refuse a spec with a zero point."""
    if not spec.symmetric:
        raise ConfigError(
            f"{_name(owner)} has no zero point: ask for '{spec.with_(symmetric=True)}' instead of '{spec}'"
        )


def need_bits(owner: Owner, spec: QuantSpec, highest: int) -> None:
    """Refuse a spec with too many bits."""
    if spec.bits > highest:
        raise ConfigError(f"{_name(owner)} supports up to {highest} bits, not {spec.format}")


def _name(owner: Owner) -> str:
    return owner if isinstance(owner, str) else type(owner).__name__
