"""Pattern: MatcherNodes and joint checkers that belong together, checked to be sound before they are searched for."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from bitwright.errors import ConfigError, suggest
from bitwright.graph.match.node import MatcherNode


@dataclass(frozen=True)
class JointChecker:
    """A condition on several nodes at once: a function of these nodes, in order, and the instances by node name."""

    names: tuple[str, ...]
    function: Callable[..., Any]
    by_keyword: bool

    @classmethod
    def of(cls, item: Any) -> "JointChecker":
        """Read ``(names, function)``."""
        if isinstance(item, JointChecker):
            return item
        try:
            names, function = item
        except (TypeError, ValueError):
            raise ConfigError(f"a joint checker is a tuple (names, function), not {item!r}") from None
        names = (names,) if isinstance(names, str) else tuple(names)
        if not names or not callable(function):
            raise ConfigError(f"a joint checker is a tuple (names, function) with at least one name, not {item!r}")
        return cls(names, function, _takes_keyword(function))

    def check(self, nodes: Mapping[str, fx.Node], modules: Mapping[str, Any]) -> Any:
        """Ask the function."""
        given = [nodes[name] for name in self.names]
        known = {name: modules[name] for name in self.names}
        return self.function(*given, modules=known) if self.by_keyword else self.function(*given, known)


def _takes_keyword(function: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get("modules")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


@dataclass(eq=False)
class Pattern:
    """What is searched for.

    Attributes:
        nodes: the nodes, in any order; their inputs make them an acyclic graph in one piece.
        joint_checkers: conditions on several nodes, as ``(names, function)``.
        anchors: the names of the nodes that no other node of the pattern reads.
    """

    nodes: Sequence[MatcherNode]
    joint_checkers: Sequence[Any] = ()
    anchors: tuple[str, ...] = field(init=False)
    by_name: dict[str, MatcherNode] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = tuple(self.nodes or ())
        self.joint_checkers = tuple(JointChecker.of(item) for item in self.joint_checkers or ())
        if not self.nodes:
            raise ConfigError("a pattern needs at least one MatcherNode, and this one has none")
        if wrong := [n for n in self.nodes if not isinstance(n, MatcherNode)]:
            raise ConfigError(f"a pattern consists of MatcherNodes, not {wrong[0]!r}")
        self.by_name = {node.name: node for node in self.nodes}
        self._check_names()
        read = {name for node in self.nodes for name in node.inputs or () if name is not None}
        self.anchors = tuple(node.name for node in self.nodes if node.name not in read)
        self._check_acyclic()
        self._check_connected()

    def _check_names(self) -> None:
        names = [node.name for node in self.nodes]
        if twice := [name for name in self.by_name if names.count(name) > 1]:
            raise ConfigError(f"the pattern has several nodes called {twice[0]!r}; each needs a name of its own")
        for node in self.nodes:
            for name in node.inputs or ():
                if name is not None and name not in self.by_name:
                    raise ConfigError(
                        f"the input {name!r} of {node.name!r} is no node of the pattern{suggest(name, names)}"
                    )
        for joint in self.joint_checkers:
            for name in joint.names:
                if name not in self.by_name:
                    raise ConfigError(f"a joint checker names {name!r}, no node of the pattern{suggest(name, names)}")

    def _check_acyclic(self) -> None:
        waiting = {n.name: {i for i in n.inputs or () if i is not None} for n in self.nodes}
        while ready := [name for name, inputs in waiting.items() if not inputs & waiting.keys()]:
            for name in ready:
                del waiting[name]
        if waiting:
            raise ConfigError(f"the pattern's nodes go round in a circle: {', '.join(map(repr, waiting))}")

    def _check_connected(self) -> None:
        blocks = [{name} for name in self.by_name]
        links = [{n.name, *(i for i in n.inputs or () if i is not None)} for n in self.nodes]
        for link in (*links, *(set(joint.names) for joint in self.joint_checkers)):
            touched = [b for b in blocks if b & link]
            blocks = [b for b in blocks if not b & link] + [set().union(*touched)]
        if len(blocks) > 1:
            shown = " and ".join("(" + ", ".join(sorted(b)) + ")" for b in sorted(blocks, key=sorted))
            raise ConfigError(f"the pattern falls apart into {shown}; join them by their inputs or by a joint checker")
