"""Rows that were measured, kept outside of the repository, so that a stopped run goes on where it was."""

import json
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.accuracy.float_models import CACHE
from bitwright.files import atomic_write


class Row(NamedTuple):
    """What one method gives with some bits.

    Attributes:
        bits: such as W4A8.
        method: how the model was made.
        accuracy: on the test images, in percent.
        agreement: how many of them get the class that the float net gives them, in percent.
        divergence: Kullback-Leibler, of the float net's predictions from this model's, on average.
        seconds: that it took, by the clock.
        processor: that it took, of all cores together.
    """

    bits: str
    method: str
    accuracy: float
    agreement: float = 100.0
    divergence: float = 0.0
    seconds: float = 0.0
    processor: float = 0.0


def kept(key: tuple[object, ...], measure: Callable[[], Row]) -> Row:
    """The row of that key from the cache, else measured and stored."""
    name = "-".join(str(part).replace(" ", "_").replace("/", "_") for part in key)
    path = CACHE / "measured" / f"{name}.json"
    if path.exists():
        return Row(*json.loads(path.read_text()))
    row = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(row))
    return row
