"""The search: every assignment of a graph's nodes to a pattern's nodes that fulfils it.

Two nodes of a pattern are never the same node of the graph. The search starts at an anchor with few candidates and
follows the pattern's edges, so it looks at a neighbourhood of each candidate only; within it, all is tried. Therefore
it finds every match, in a time that grows with the number of candidates.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from bitwright.errors import ScheduleError
from bitwright.graph.capture.guards import is_guard
from bitwright.graph.match.index import GraphIndex
from bitwright.graph.match.node import InputMatchType, MatcherNode
from bitwright.graph.match.pattern import JointChecker, Pattern
from bitwright.graph.names import node_name


@dataclass(frozen=True, eq=False)
class Match:
    """A place where a pattern occurs.

    Attributes:
        nodes: the graph's nodes by the names of the pattern's.
        modules: likewise the modules, functions and parameters.
        reasons: what checkers said against it; a match has none, a near miss has some.
    """

    nodes: dict[str, fx.Node]
    modules: dict[str, Any]
    reasons: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[fx.Node, ...]:
        """The nodes in the pattern's order, by which two matches of one pattern are told apart."""
        return tuple(self.nodes.values())


class Matcher:
    """Finds a pattern in graphs; ``steps`` counts the nodes it has looked at."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.steps = 0

    def find(self, index: GraphIndex) -> Iterator[Match]:
        """Every match, in the order of the graph."""
        return (match for match in self.find_near(index) if not match.reasons)

    def find_near(self, index: GraphIndex) -> Iterator[Match]:
        """Every match, and everything that would be one but for the reasons that checkers gave."""
        candidates = {node.name: index.candidates(node) for node in self.pattern.nodes}
        if all(candidates.values()):
            yield from _Search(self, index, candidates).run()

    def holds(self, match: Match, index: GraphIndex) -> bool:
        """Whether a match still is one, on a graph that may have changed since."""
        if not all(map(is_in_graph, match.key)):
            return False
        index.refresh(match.key)
        search = _Search(self, index, {name: [node] for name, node in match.nodes.items()})
        return any(not again.reasons for again in search.run(fixed=True))


class _Search:
    def __init__(self, matcher: Matcher, index: GraphIndex, candidates: dict[str, list[fx.Node]]) -> None:
        self.matcher = matcher
        self.pattern = matcher.pattern
        self.index = index
        self.candidates = candidates
        self.verdicts: dict[tuple[str, fx.Node], Any] = {}
        self.fixed = False
        self.order = self._plan()
        self.joint = self._joint_by_step()

    def run(self, *, fixed: bool = False) -> Iterator[Match]:
        """All assignments; ``fixed`` tries the candidates given and no others, whatever the graph connects."""
        self.fixed = fixed
        return self._extend({}, ())

    def _plan(self) -> list[str]:
        """Begin at the rarest anchor; then take what goes into nodes taken, or else what reads them."""
        order = [min(self.pattern.anchors, key=lambda name: len(self.candidates[name]))]
        rest = [n for n in self.pattern.by_name if n not in order]
        while rest:
            chosen = next((n for n in rest if any(n in self._named(p) for p in order)), None)
            chosen = chosen or next((n for n in rest if any(p in self._named(n) for p in order)), None)
            chosen = chosen or next((n for n in rest if n in self.pattern.anchors), rest[0])
            order.append(chosen)
            rest.remove(chosen)
        return order

    def _named(self, name: str) -> set[str]:
        return {i for i in self.pattern.by_name[name].inputs or () if i is not None}

    def _joint_by_step(self) -> list[list[Any]]:
        steps: list[list[Any]] = [[] for _ in self.order]
        for joint in self.pattern.joint_checkers:
            steps[max(self.order.index(name) for name in joint.names)].append(joint)
        return steps

    def _extend(self, chosen: dict[str, fx.Node], reasons: tuple[str, ...]) -> Iterator[Match]:
        if len(chosen) == len(self.order):
            yield from self._complete(chosen, reasons)
            return
        name = self.order[len(chosen)]
        joint = self.joint[len(chosen)]
        for node in self._reachable(name, chosen):
            self.matcher.steps += 1
            if not self._fits(name, node, chosen):
                continue
            chosen[name] = node
            said = [self._ask(name, node)]
            if joint and said[0] is not False:
                modules = {n: self.index.instance(m) for n, m in chosen.items()}
                said += [_verdict(self._ask_joint(checker, chosen, modules)) for checker in joint]
            if not any(s is False for s in said):
                yield from self._extend(chosen, reasons + tuple(s for s in said if isinstance(s, str)))
            del chosen[name]

    def _reachable(self, name: str, chosen: dict[str, fx.Node]) -> Iterable[fx.Node]:
        if self.fixed:
            return self.candidates[name]
        for reader, node in chosen.items():
            if name in self._named(reader):
                wanted, actual = self.pattern.by_name[reader], self.index.inputs(node)
                if wanted.input_match_type is InputMatchType.ALL:
                    return (actual[(wanted.inputs or ()).index(name)],)
                return dict.fromkeys(actual)
        read = [node for n, node in chosen.items() if n in self._named(name)]
        if read:
            return min((list(node.users) for node in read), key=len)
        return self.candidates[name]

    def _fits(self, name: str, node: fx.Node, chosen: dict[str, fx.Node]) -> bool:
        """Whether a node is of the kind wanted, is not taken, and stands with those chosen as the pattern says."""
        wanted, actual = self.pattern.by_name[name], self.index.inputs(node)
        if node in chosen.values() or not wanted.may_be(self.index.kind(node)):
            return False
        if not _arity_fits(wanted, len(actual)):
            return False
        for other, taken in chosen.items():
            if not _edge_fits(wanted, actual, other, taken):
                return False
            if not _edge_fits(self.pattern.by_name[other], self.index.inputs(taken), name, node):
                return False
        return True

    def _ask(self, name: str, node: fx.Node) -> Any:
        checker: Callable[..., Any] | None = self.pattern.by_name[name].checker
        if checker is None:
            return True
        if (name, node) not in self.verdicts:
            with _told(f"the checker of {name!r}, at {node_name(node)}"):
                self.verdicts[name, node] = _verdict(checker(node, self.index.instance(node)))
        return self.verdicts[name, node]

    def _ask_joint(self, checker: JointChecker, chosen: dict[str, fx.Node], modules: dict[str, Any]) -> Any:
        where = ", ".join(node_name(chosen[name]) for name in checker.names)
        with _told(f"the joint checker of {', '.join(map(repr, checker.names))}, at {where}"):
            return checker.check(chosen, modules)

    def _complete(self, chosen: dict[str, fx.Node], reasons: tuple[str, ...]) -> Iterator[Match]:
        nodes = {name: chosen[name] for name in self.pattern.by_name}
        inside = set(nodes.values())
        for name, node in nodes.items():
            strangers = [u for u in node.users if u not in inside and not is_guard(u)]
            if strangers and name not in self.pattern.anchors and not self.pattern.by_name[name].outside_users:
                reasons = (*reasons, f"{node_name(node)} is also read by {', '.join(node_name(u) for u in strangers)}")
        yield Match(nodes, {name: self.index.instance(node) for name, node in nodes.items()}, reasons)


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Name the place where what the pattern's author wrote fails."""
    try:
        yield
    except Exception as error:
        raise ScheduleError(f"{where}, failed: {type(error).__name__}: {error}") from error


def is_in_graph(node: fx.Node) -> bool:
    """Whether a node has not been erased: its neighbours in the graph's list know of it."""
    return node.prev.next is node


def _verdict(answer: Any) -> Any:
    """A checker's answer as True, False, or the text that says why not."""
    return answer if isinstance(answer, str) and answer else bool(answer)


def _arity_fits(wanted: MatcherNode, actual: int) -> bool:
    if wanted.inputs is None:
        return True
    more = wanted.input_match_type is InputMatchType.SUBSET
    return actual >= len(wanted.inputs) if more else actual == len(wanted.inputs)


def _edge_fits(wanted: MatcherNode, actual: tuple[fx.Node, ...], name: str, node: fx.Node) -> bool:
    """Whether ``node``, which the pattern calls ``name``, is among the inputs as often and where it should be."""
    inputs = wanted.inputs or ()
    if name not in inputs:
        return True
    if wanted.input_match_type is InputMatchType.ALL:
        return all(a is node for i, a in zip(inputs, actual, strict=True) if i == name)
    return actual.count(node) >= inputs.count(name)
