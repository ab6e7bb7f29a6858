"""Attributes and methods of the user's modules that must outlive capture."""

from collections.abc import Iterable, Mapping

from torch import nn

from bitwright.errors import ConfigError, UnknownNameError, suggest


def check_attributes(model: object, wishes: Mapping[str, Iterable[str]]) -> None:
    """Refuse names that the modules do not have; a captured model keeps all those they do.

    Modules inside a captured model keep their class, and the captured model itself has the attributes and methods of
    the class it was captured from, so there is nothing to copy, only to check.
    """
    if not isinstance(wishes, Mapping):
        raise ConfigError(f"preserve_attr must be a dict of module names and attribute names, not {wishes!r}")
    modules = dict(model.named_modules(remove_duplicate=False)) if isinstance(model, nn.Module) else {}
    for path, names in wishes.items():
        if path not in modules:
            hint = suggest(path, [p for p in modules if p])
            raise UnknownNameError(f"preserve_attr names the module {path!r}, which the model does not have{hint}")
        for name in [names] if isinstance(names, str) else names:
            _check_attribute(modules[path], f"the module {path!r}" if path else "the model", name)


def _check_attribute(module: nn.Module, owner: str, name: str) -> None:
    if not hasattr(module, name):
        hint = suggest(name, [n for n in dir(module) if not n.startswith("_")])
        raise UnknownNameError(f"{owner} ({type(module).__name__}) has no attribute {name!r} to preserve{hint}")
