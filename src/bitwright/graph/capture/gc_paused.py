"""Pause Python's garbage collection while very many objects are made, none of which is garbage yet."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Otherwise every collection looks at all objects again, and the time grows faster than the model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
