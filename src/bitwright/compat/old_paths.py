"""Modules that exist only as paths, so that old code can import names from their former places."""

import sys
from collections.abc import Iterable, Mapping
from types import ModuleType

from bitwright.compat.refused import refuse


def add_paths(
    package: str, paths: Mapping[str, str | Iterable[str]], refused: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Create modules below a package that hold some of its names, or refuse names that are gone, with replacements.

    ::

        add_paths(__name__, {"conv": "QConv2d QConvTranspose2d"})  # from …modules.conv import QConv2d
    """
    home = sys.modules[package]
    for path in {**paths, **(refused or {})}:
        full = f"{package}.{path}"
        module = sys.modules.setdefault(full, ModuleType(full, f"Names of {package}, under their old path."))
        listed = paths.get(path, ())
        names = listed.split() if isinstance(listed, str) else listed
        vars(module).update({name: getattr(home, name) for name in names})
        if refused and path in refused:
            vars(module)["__getattr__"] = refuse(full, refused[path])
        _attach(home, path, module)


def _attach(home: ModuleType, path: str, module: object) -> None:
    parent, _, last = path.rpartition(".")
    setattr(sys.modules[f"{home.__name__}.{parent}"] if parent else home, last, module)
