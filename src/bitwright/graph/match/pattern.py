"""Pattern: MatcherNodes and joint checkers that belong together, validated before the search."""

import graphlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from bitwright.errors import ConfigError, suggest
from bitwright.graph.match.node import MatcherNode


@dataclass(frozen=True)
class JointChecker:
    """A condition on several nodes: a function of these nodes, in order, and of the instances by node name."""

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
            raise ConfigError(f"a joint checker must be a tuple (names, function), not {item!r}") from None
        names = (names,) if isinstance(names, str) else tuple(names)
        if not names or not callable(function):
            raise ConfigError(f"a joint checker must be a tuple (names, function) with at least one name, not {item!r}")
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
        nodes: the nodes, in any order; their inputs must make them one connected acyclic graph.
        joint_checkers: conditions on several nodes, as ``(names, function)``.
        anchors: the names of the nodes that no other node of the pattern reads.
        closed: the names of those that must not be read from outside.
        readers_through: the nodes that read another one through a chain.
    """

    nodes: Sequence[MatcherNode]
    joint_checkers: Sequence[Any] = ()
    anchors: tuple[str, ...] = field(init=False)
    by_name: dict[str, MatcherNode] = field(init=False)
    closed: tuple[str, ...] = field(init=False)
    readers_through: tuple[MatcherNode, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = _checked_nodes(self.nodes)
        self.joint_checkers = tuple(map(JointChecker.of, self.joint_checkers or ()))
        self.by_name = {node.name: node for node in self.nodes}
        self._check_names()
        read = sorted(set().union(*(node.named for node in self.nodes)))
        self.anchors = tuple(name for name in self.by_name if name not in read)
        self.closed = tuple(name for name in read if not self.by_name[name].outside_users)
        self.readers_through = tuple(node for node in self.nodes if node.through)
        self._check_acyclic()
        self._check_connected()

    def _check_names(self) -> None:
        names = [node.name for node in self.nodes]
        if twice := [name for name in self.by_name if names.count(name) > 1]:
            raise ConfigError(f"the pattern has several nodes called {twice[0]!r}; each needs its own name")
        for node in self.nodes:
            if unknown := node.named - self.by_name.keys():
                name = min(unknown)
                raise ConfigError(
                    f"the input {name!r} of {node.name!r} is not a node of the pattern{suggest(name, names)}"
                )
        for joint in self.joint_checkers:
            if unknown := set(joint.names) - self.by_name.keys():
                name = min(unknown)
                raise ConfigError(f"a joint checker names {name!r}, not a node of the pattern{suggest(name, names)}")

    def _check_acyclic(self) -> None:
        try:
            graphlib.TopologicalSorter({node.name: node.named for node in self.nodes}).prepare()
        except graphlib.CycleError as error:
            circle = ", ".join(map(repr, sorted(set(error.args[1]))))
            raise ConfigError(f"the pattern's nodes form a cycle: {circle}") from error

    def _check_connected(self) -> None:
        blocks: list[set[str]] = []
        for link in [{node.name} | node.named for node in self.nodes] + [set(j.names) for j in self.joint_checkers]:
            apart = [block for block in blocks if not block & link]
            blocks = [*apart, link.union(*(block for block in blocks if block & link))]
        if len(blocks) > 1:
            shown = " and ".join(f"({', '.join(block)})" for block in sorted(map(sorted, blocks)))
            raise ConfigError(
                f"the pattern is in separate pieces, {shown}; join them by their inputs or by a joint checker"
            )


def _checked_nodes(nodes: Any) -> tuple[MatcherNode, ...]:
    if not nodes:
        raise ConfigError("a pattern needs at least one MatcherNode, and this one has none")
    if wrong := [n for n in nodes if not isinstance(n, MatcherNode)]:
        raise ConfigError(f"a pattern must consist of MatcherNodes, not {wrong[0]!r}")
    return tuple(nodes)
