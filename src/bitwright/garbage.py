"""Pause Python's garbage collection while a great many objects are created, none of them garbage yet."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause collection; otherwise every one looks at all objects again, and the time grows faster than the model."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
