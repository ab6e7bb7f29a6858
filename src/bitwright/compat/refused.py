"""Names of the older toolkits that have no equivalent: importing one says what to use instead."""

from collections.abc import Callable, Mapping
from typing import Any

from bitwright.errors import BitwrightError, suggest


class RefusedNameError(BitwrightError, ImportError):
    """A name of an older toolkit that Bitwright does not have, with its replacement."""


def refuse(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module that says what to use instead of each of ``names``."""

    def look_up(name: str) -> Any:
        if name in names:
            raise RefusedNameError(f"{module.removeprefix('bitwright.compat.')} has no {name}: {names[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}{suggest(name, names)}")

    look_up.refused = names  # pyrefly: ignore
    return look_up
