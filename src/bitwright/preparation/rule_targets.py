"""Subjects: the operators of a captured model as rules see them."""

from torch import fx, nn

from bitwright.graph.facts import facts
from bitwright.graph.model import users_class
from bitwright.recipe import Subject


class Subjects:
    """Tells rules what the operators of a model are called, and of which classes they are part.

    Args:
        whole: the captured model, or the user's own where it could not be captured as a whole.
    """

    def __init__(self, whole: nn.Module) -> None:
        modules = whole.named_modules(remove_duplicate=False)
        self._types = {path: _class_names(module) for path, module in modules}

    def of_node(self, node: fx.Node, name: str, prefix: str, operator: str) -> Subject:
        """A call in the graph that stands at ``prefix``."""
        scope = _join(prefix, facts(node).scope)
        path = name if node.op == "call_module" else scope
        return Subject(name, scope, operator, self._along(path), _join(prefix, node.name))

    def of_module(self, path: str, operator: str) -> Subject:
        """A module outside of any graph."""
        return Subject(path, path, operator, self._along(path))

    def _along(self, path: str) -> tuple[str, ...]:
        """The classes of a module and of all that it is part of."""
        parts = path.split(".") if path else []
        paths = [".".join(parts[:i]) for i in range(len(parts) + 1)]
        return tuple(dict.fromkeys(name for p in reversed(paths) for name in self._types.get(p, ())))


def _class_names(module: nn.Module) -> list[str]:
    classes = users_class(module).__mro__
    return [cls.__name__ for cls in classes if issubclass(cls, nn.Module) and cls is not nn.Module]


def _join(prefix: str, name: str) -> str:
    return ".".join(p for p in (prefix, name) if p)
