"""Functions that keep their results (``functools.lru_cache``): they must not keep proxies once a trace has ended."""

import functools
import gc
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from bitwright.graph.capture.nesting import holds_proxy

_Keeper: type = type(functools.lru_cache(len))


def keepers_named_in(frame: FrameType) -> list[Any]:
    """The functions that keep results among what a frame's code names: variables, globals, and attributes of these."""
    names = frame.f_code.co_names
    given = [*frame.f_locals.values(), *(frame.f_globals[n] for n in names if n in frame.f_globals)]
    return [value for value in (*given, *_attributes(given, names)) if type(value) is _Keeper]


def _attributes(owners: Iterable[Any], names: Iterable[str]) -> Iterator[Any]:
    """Attributes of objects, of their classes and of the bases of these, without computing any."""
    for owner in owners:
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        spaces = [*map(vars, kinds), getattr(owner, "__dict__", {})]
        yield from (space[name] for name in names for space in spaces if name in space)


def forget_proxies(keepers: Iterable[Any]) -> None:
    """Empty those that keep proxies."""
    for keeper in keepers:
        if any(holds_proxy(kept) for kept in gc.get_referents(keeper)):
            keeper.cache_clear()
