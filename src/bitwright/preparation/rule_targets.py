"""Rule targets: the operators of a captured model as rules see them."""

from functools import cached_property

from torch import fx, nn

from bitwright.graph.facts import facts, user_name
from bitwright.graph.model import users_class
from bitwright.graph.names import qualified
from bitwright.nn.operators import operator_of_module
from bitwright.recipe import RuleTarget


class RuleTargets:
    """Knows the names of a model's operators in rules, and the classes they are part of.

    ``whole`` is the captured model, or the user's own if it could not be captured as a whole.
    """

    def __init__(self, whole: nn.Module) -> None:
        self._whole = whole
        self._classes: dict[str, tuple[str, ...]] = {}
        self._captured: dict[tuple[str, str], RuleTarget] = {}
        self.seen: dict[RuleTarget, None] = {}  # all that were looked up, for rules that match nothing

    def of_node(self, node: fx.Node, path: str, operator: str) -> RuleTarget:
        """A call in the graph at ``path``."""
        name, scope = qualified(path, user_name(node)), qualified(path, facts(node).scope)
        types = self._along(name if node.op == "call_module" else scope)
        origin = self._captured.get((path, facts(node).origin))
        return self._note(RuleTarget(name, scope, operator, types, qualified(path, node.name), origin))

    def of_module(self, path: str, module: nn.Module) -> RuleTarget:
        return self._note(RuleTarget(path, path, module_kind(module), self._along(path)))

    def of_captured(self, node: fx.Node, path: str, operator: str) -> RuleTarget:
        """A call before simplifying, which may remove it, or put others in its place."""
        target = self._captured[path, node.name] = self.of_node(node, path, operator)
        return target

    def _note(self, target: RuleTarget) -> RuleTarget:
        self.seen[target] = None
        return target

    @cached_property
    def _types(self) -> dict[str, list[str]]:
        """The classes of each module before any is swapped."""
        names: dict[type[nn.Module], list[str]] = {}
        types: dict[str, list[str]] = {}
        for path, module in self._whole.named_modules(remove_duplicate=False):
            kind = users_class(module)
            types[path] = names[kind] = names.get(kind) or _class_names(kind)
        return types

    def _along(self, path: str) -> tuple[str, ...]:
        """The classes of a module and of all that it is part of."""
        if path not in self._classes:
            outside = self._along(path.rpartition(".")[0]) if path else ()
            self._classes[path] = tuple(dict.fromkeys((*self._types.get(path, ()), *outside)))
        return self._classes[path]


def module_kind(module: nn.Module) -> str:
    """The name in the ledger and in rules for what a module computes."""
    operator = operator_of_module(module)
    return operator.name if operator else type(module).__name__


def _class_names(kind: type[nn.Module]) -> list[str]:
    return [cls.__name__ for cls in kind.__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
