"""Which modules stay whole: by name, by glob, or by class."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from bitwright.errors import ConfigError, UnknownNameError, suggest

Leaf = str | type[nn.Module]
_TYPE = "type:"
ISLAND = "island:"


def find_leaves(model: nn.Module, wishes: Iterable[Leaf]) -> dict[str, str]:
    """The modules that ``wishes`` match, each with its wish; a wish without a match is an error.

    A wish is a module's name, a glob over names, a class, or ``type:`` with the name of a class, plain or dotted:
    ``"backbone.neck"``, ``"layers.*.attention"``, ``MyBlock``, ``"type:MyBlock"``, ``"type:mypackage.nets.MyBlock"``.
    With ``island:`` before it, as in ``"island:layers.*.attention"``, the module runs as written, and the layers inside
    are quantized one by one, so its Python may depend on sizes that change from call to call.
    """
    if isinstance(wishes, str | type):
        wishes = [wishes]
    modules = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    found: dict[str, str] = {}
    for wish in wishes:
        text = spell(wish)
        chosen = [path for path, module in modules.items() if _is_meant(path, module, wish)]
        if not chosen:
            raise UnknownNameError(f"the leaf {text!r} is not a module of the model{_hint(text, modules)}")
        found.update(dict.fromkeys(chosen, text))
    return outermost(found)


def outermost(paths: Mapping[str, str]) -> dict[str, str]:
    """Leave out paths that are inside another."""
    return {p: text for p, text in paths.items() if not any(p.startswith(f"{outer}.") for outer in paths)}


def spell(wish: Leaf) -> str:
    """A wish as text, which means the same."""
    if isinstance(wish, str):
        return wish
    if isinstance(wish, type) and issubclass(wish, nn.Module):
        return f"{_TYPE}{wish.__module__}.{wish.__qualname__}"
    raise ConfigError(f"a leaf must be a name, a glob, 'type:…' or a module's class, not {wish!r}")


def _is_meant(path: str, module: nn.Module, wish: Leaf) -> bool:
    if isinstance(wish, type):
        return isinstance(module, wish)
    wish = wish.removeprefix(ISLAND)
    if wish.startswith(_TYPE):
        return any(wish[len(_TYPE) :] in _names(kind) for kind in type(module).__mro__)
    return path == wish or fnmatchcase(path, wish)


def _names(kind: type) -> tuple[str, str, str]:
    return kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"


def _hint(text: str, modules: dict[str, nn.Module]) -> str:
    text = text.removeprefix(ISLAND)
    if text.startswith(_TYPE):
        return suggest(text, {f"{_TYPE}{type(module).__name__}" for module in modules.values()})
    return suggest(text, modules)
