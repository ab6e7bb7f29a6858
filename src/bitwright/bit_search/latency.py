"""Latency: check the table that the user measured."""

import math
from collections.abc import Mapping, Sequence

from bitwright.errors import ConfigError, suggest


def seconds_of(
    layers: Sequence[str], bits: Sequence[int], latency: Mapping[str, Mapping[int, float]]
) -> list[list[float]]:
    """The seconds of each layer with each number of bits; an error names what is missing or unknown."""
    for name in latency:
        if name not in layers:
            raise ConfigError(
                f"the table of latencies names {name!r}, which is not a layer{suggest(str(name), layers)}"
            )
    return [[_seconds(name, b, latency.get(name, {})) for b in bits] for name in layers]


def _seconds(layer: str, bits: int, row: Mapping[int, float]) -> float:
    if bits not in row:
        known = ", ".join(map(str, row)) or "none"
        raise ConfigError(f"the table of latencies has no {bits} bits for {layer!r}, only {known}")
    value = row[bits]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"the latency of {layer!r} with {bits} bits must be a number of seconds, not {value!r}")
    return float(value)
