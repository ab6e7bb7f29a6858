"""The search: every assignment of a graph's nodes to a pattern's nodes that fulfils it.

Two nodes of a pattern are never the same node of the graph. The search starts at an anchor with few candidates and
follows the pattern's edges, so it looks only at a neighbourhood of each candidate, where it tries everything. So it
finds every match, in a time that grows with the number of candidates.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from bitwright.errors import ScheduleError
from bitwright.graph.capture.guards import is_guard
from bitwright.graph.match.index import GraphIndex
from bitwright.graph.match.node import MatcherNode
from bitwright.graph.match.pattern import JointChecker, Pattern
from bitwright.graph.names import node_name
from bitwright.graph.walks import back_through, first_input


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
        nodes, anchors = self.pattern.by_name, self.pattern.anchors
        order = [min(anchors, key=lambda name: len(self.candidates[name]))]

        def rank(name: str) -> int:
            if any(name in nodes[taken].named for taken in order):
                return 0
            return 1 if nodes[name].named & set(order) else 2 if name in anchors else 3

        while rest := [name for name in nodes if name not in order]:
            order.append(min(rest, key=rank))
        return order

    def _joint_by_step(self) -> list[list[Any]]:
        steps: list[list[Any]] = [[] for _ in self.order]
        for joint in self.pattern.joint_checkers:
            steps[max(self.order.index(name) for name in joint.names)].append(joint)
        return steps

    def _extend(self, chosen: dict[str, fx.Node], reasons: tuple[str, ...]) -> Iterator[Match]:
        if len(chosen) == len(self.order):
            yield self._complete(chosen, reasons)
            return
        name = self.order[len(chosen)]
        for node in self._reachable(name, chosen):
            self.matcher.steps += 1
            if not self._fits(name, node, chosen):
                continue
            said = self._said_of({**chosen, name: node}, name)
            if False not in said:
                more = tuple(s for s in said if isinstance(s, str))
                yield from self._extend({**chosen, name: node}, reasons + more)

    def _said_of(self, chosen: dict[str, fx.Node], name: str) -> list[Any]:
        """What the checkers that can be asked, now that ``name`` is chosen, say: True, False or a text."""
        said = [self._ask(name, chosen[name])]
        joint = self.joint[len(chosen) - 1]
        if joint and said[0] is not False:
            modules = {n: self.index.instance(m) for n, m in chosen.items()}
            said += [_verdict(self._ask_joint(checker, chosen, modules)) for checker in joint]
        return said

    def _reachable(self, name: str, chosen: dict[str, fx.Node]) -> Iterable[fx.Node]:
        if self.fixed:
            return self.candidates[name]
        for reader, node in chosen.items():
            if name in self.pattern.by_name[reader].named:
                return dict.fromkeys(self._inputs_called(name, self.pattern.by_name[reader], node))
        wanted = self.pattern.by_name[name]
        read = [node for n, node in chosen.items() if n in wanted.named]
        if read:
            return min((self._readers(wanted, node) for node in read), key=len)
        return self.candidates[name]

    def _inputs_called(self, name: str, reader: MatcherNode, node: fx.Node) -> Iterator[fx.Node]:
        """What may be the input ``name`` of a node: what it reads in that place, and what that passes on."""
        return (found for way in self._ways(name, reader, node) for found in way)

    def _ways(self, name: str, reader: MatcherNode, node: fx.Node) -> Iterator[list[fx.Node]]:
        actual = self.index.inputs(node)
        ordered = reader.input_match_type.ordered
        for start in [actual[(reader.inputs or ()).index(name)]] if ordered else actual:
            yield list(back_through(start, lambda n: self._passes(reader, n)))

    def _readers(self, wanted: MatcherNode, node: fx.Node) -> list[fx.Node]:
        """The nodes that read a node, directly or through what ``wanted`` lets through."""
        found = dict.fromkeys(node.users)
        for user in [u for u in node.users if first_input(u) is node and self._passes(wanted, u)]:
            found.update(dict.fromkeys(self._readers(wanted, user)))
        return list(found)

    def _passes(self, reader: MatcherNode, node: fx.Node) -> bool:
        if reader.through == ():
            return False
        with _told(f"the through of {reader.name!r}, at {node_name(node)}"):
            return reader.lets_through(node, self.index.kind(node), self.index.instance(node))

    def _fits(self, name: str, node: fx.Node, chosen: dict[str, fx.Node]) -> bool:
        """Whether a node is of the kind wanted, is not taken, and stands with those chosen as the pattern says."""
        wanted = self.pattern.by_name[name]
        if node in chosen.values() or not wanted.may_be(self.index.kind(node)):
            return False
        if not _arity_fits(wanted, len(self.index.inputs(node))):
            return False
        for other, taken in chosen.items():
            if not self._edge_fits(wanted, node, other, taken):
                return False
            if not self._edge_fits(self.pattern.by_name[other], taken, name, node):
                return False
        return True

    def _edge_fits(self, reader: MatcherNode, node: fx.Node, name: str, given: fx.Node) -> bool:
        """Whether ``given``, ``name`` in the pattern, is among a node's inputs as often and where it should be."""
        inputs, actual = reader.inputs or (), self.index.inputs(node)
        if name not in inputs:
            return True
        if reader.through != ():
            return given in self._inputs_called(name, reader, node)
        if reader.input_match_type.ordered:
            return all(a is given for i, a in zip(inputs, actual, strict=False) if i == name)
        return actual.count(given) >= inputs.count(name)

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

    def _complete(self, chosen: dict[str, fx.Node], reasons: tuple[str, ...]) -> Match:
        nodes = {name: chosen[name] for name in self.pattern.by_name}
        closed = [n for n in self.pattern.nodes if not n.outside_users and n.name not in self.pattern.anchors]
        if closed:
            parts = {name: [node, *self._chain_after(name, nodes)] for name, node in nodes.items()}
            inside = set().union(*parts.values())
            told = (_readers_outside(node, inside) for wanted in closed for node in parts[wanted.name])
            reasons += tuple(filter(None, told))
        return Match(nodes, {name: self.index.instance(node) for name, node in nodes.items()}, reasons)

    def _chain_after(self, name: str, nodes: dict[str, fx.Node]) -> list[fx.Node]:
        """What stands between a node and the one that reads it through others."""
        readers = [r for r in self.pattern.nodes if r.through != () and name in r.named]
        ways = [way for reader in readers for way in self._ways(name, reader, nodes[reader.name])]
        return next((way[: way.index(nodes[name])] for way in ways if nodes[name] in way), [])


def _readers_outside(node: fx.Node, inside: set[fx.Node]) -> str | None:
    strangers = [node_name(user) for user in node.users if user not in inside and not is_guard(user)]
    return f"{node_name(node)} is also read by {', '.join(strangers)}" if strangers else None


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
    return actual == len(wanted.inputs) if wanted.input_match_type.exact else actual >= len(wanted.inputs)
