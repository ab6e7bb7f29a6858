"""Load what the user names as ``module:function``, with clear errors if that fails."""

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bitwright.cli.boundary import users_code
from bitwright.errors import BitwrightError, ConfigError, UnknownNameError, suggest

if TYPE_CHECKING:
    from torch import nn


def load(target: str, option: str) -> Any:  # noqa: ANN401
    """Import ``target`` (``package.module:name``); ``option`` is where the user wrote it."""
    module_name, _, path = target.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        wish = ".".join(Path(module_name).with_suffix("").parts) + f":{path or 'build'}"
        raise ConfigError(f"{option} {target!r} names a file; name the module: {wish}")
    if not path or not all(map(str.isidentifier, module_name.split("."))):
        raise ConfigError(f"{option} {target!r} must be MODULE:FUNCTION, such as mypkg.nets:build")
    found: Any = load_module(module_name, option)
    for part in path.split("."):
        if not hasattr(found, part):
            owner = found.__name__ if isinstance(found, ModuleType | type) else type(found).__name__
            raise UnknownNameError(f"{option}: {owner} has no {part!r}{suggest(part, _public_names(found))}")
        found = getattr(found, part)
    return found


def load_module(name: str, option: str) -> ModuleType:
    """Import a module, also looking in the current directory."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        with users_code(f"{option}: importing {name}"):
            return importlib.import_module(name)
    except BitwrightError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            hint = suggest(name, _siblings(name, here))
            raise UnknownNameError(
                f"{option}: no module {cause.name!r} here or among the installed packages{hint}"
            ) from error
        raise


def load_model(target: str) -> "nn.Module":
    """Load the model: an ``nn.Module``, or a function or class that returns one when called."""
    from torch import nn

    found = load(target, "the model")
    if not isinstance(found, nn.Module) and callable(found):
        with users_code(f"the model {target}"):
            found = found()
    if not isinstance(found, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, but {target} is or returns a {type(found).__name__}")
    return found


def _public_names(owner: object) -> list[str]:
    return [n for n, v in vars(owner).items() if not n.startswith("_") and not isinstance(v, ModuleType)]


def _siblings(name: str, here: str) -> list[str]:
    """The modules next to the intended one: in its package, or in the current directory."""
    package, _, _ = name.rpartition(".")
    places, prefix = [here], ""
    if package in sys.modules:
        places, prefix = list(getattr(sys.modules[package], "__path__", [])), f"{package}."
    return [prefix + info.name for info in pkgutil.iter_modules(places)]
