"""Rows that were measured, kept outside of the repository, so that a stopped run goes on where it was."""

import json
from collections.abc import Callable

from benchmarks.accuracy.float_models import CACHE
from bitwright.files import atomic_write

Row = tuple[str, str, float, float]


def kept(key: tuple[object, ...], measure: Callable[[], Row]) -> Row:
    """The row of that key from the cache, else measured and stored."""
    name = "-".join(str(part).replace(" ", "_").replace("/", "_") for part in key)
    path = CACHE / "rows" / f"{name}.json"
    if path.exists():
        bits, method, accuracy, seconds = json.loads(path.read_text())
        return bits, method, accuracy, seconds
    row = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(row))
    return row
