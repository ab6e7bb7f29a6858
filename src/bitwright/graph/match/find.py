"""The search: find every assignment of a graph's nodes to a pattern's nodes that satisfies the pattern.

Two nodes of a pattern are never the same node of the graph. The search starts at an anchor with few candidates and
follows the pattern's edges, so it looks only at the neighbourhood of each candidate, but tries everything there. It
finds every match, in time proportional to the number of candidates.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from bitwright.errors import ScheduleError
from bitwright.graph.capture.guards import is_guard
from bitwright.graph.match.index import GraphIndex, instance_of
from bitwright.graph.match.inputs import CallView
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
        reasons: objections of checkers; a match has none, a near miss has some.
        between: the nodes that other nodes are read through.
    """

    nodes: dict[str, fx.Node]
    modules: dict[str, Any]
    reasons: tuple[str, ...] = ()
    between: tuple[fx.Node, ...] = ()
    _state: list[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_state", self._look())

    @property
    def key(self) -> tuple[fx.Node, ...]:
        """The nodes in the pattern's order, which identify a match of that pattern."""
        return tuple(self.nodes.values())

    def is_untouched(self, model: nn.Module) -> bool:
        """Whether its nodes still have the same targets, inputs and users as when it was found."""
        if not all(map(is_in_graph, (*self.key, *self.between))) or self._look() != self._state:
            return False
        return all(instance_of(node, model) is self.modules[name] for name, node in self.nodes.items())

    def _look(self) -> list[Any]:
        nodes = (*self.nodes.values(), *self.between)
        return [(node.op, node.target, node.args, node.kwargs, list(node.users)) for node in nodes]


class Matcher:
    """Finds a pattern in graphs; ``steps`` counts the nodes visited."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.steps = 0
        self._orders: dict[str, list[str]] = {}

    def find(self, index: GraphIndex) -> Iterator[Match]:
        """Every match, in the order of the graph."""
        return (match for match in self.find_near(index) if not match.reasons)

    def find_near(self, index: GraphIndex) -> Iterator[Match]:
        """Every match, and every near miss that only checkers objected to."""
        counts = {node.name: index.count(node) for node in self.pattern.nodes}
        if all(counts.values()):
            start = min(self.pattern.anchors, key=counts.__getitem__)
            yield from _Search(self, index, self._order(start)).run()

    def holds(self, match: Match, index: GraphIndex) -> bool:
        """Whether a match still holds in a graph that may have changed since."""
        if not all(map(is_in_graph, match.key)):
            return False
        index.refresh(match.key)
        search = _Search(self, index, self._order(self.pattern.anchors[0]), match.nodes)
        return any(not again.reasons for again in search.run())

    def _order(self, start: str) -> list[str]:
        """Start at an anchor, then continue with inputs of chosen nodes, or else with their readers."""
        if start in self._orders:
            return self._orders[start]
        nodes, anchors, order = self.pattern.by_name, self.pattern.anchors, [start]

        def rank(name: str) -> int:
            if any(name in nodes[taken].named for taken in order):
                return 0
            return 1 if nodes[name].named & set(order) else 2 if name in anchors else 3

        while rest := [name for name in nodes if name not in order]:
            order.append(min(rest, key=rank))
        self._orders[start] = order
        return order


class _Search:
    """One search; ``only`` limits the nodes to try, instead of all that the graph connects."""

    def __init__(
        self, matcher: Matcher, index: GraphIndex, order: list[str], only: dict[str, fx.Node] | None = None
    ) -> None:
        self.matcher = matcher
        self.pattern = matcher.pattern
        self.index = index
        self.order = order
        self.only = only
        self.verdicts: dict[tuple[str, fx.Node], Any] = {}
        self.ways: dict[tuple[str, str, fx.Node], list[list[fx.Node]]] = {}
        self.joint = self._joint_by_step()

    def run(self) -> Iterator[Match]:
        """All assignments."""
        return self._extend({}, ())

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
            more = {**chosen, name: node}
            said = self._said_of(more, name)
            if False not in said:
                yield from self._extend(more, reasons + tuple(s for s in said if s is not True))

    def _said_of(self, chosen: dict[str, fx.Node], name: str) -> list[Any]:
        """The answer of the checkers that can be asked now that ``name`` is chosen: True, False or a string."""
        said = [self._ask(name, chosen[name])]
        joint = self.joint[len(chosen) - 1]
        if joint and said[0] is not False:
            modules = {n: self.index.instance(m) for n, m in chosen.items()}
            said += [_verdict(self._ask_joint(checker, chosen, modules)) for checker in joint]
        return said

    def _reachable(self, name: str, chosen: dict[str, fx.Node]) -> Iterable[fx.Node]:
        if self.only is not None:
            return (self.only[name],)
        for reader, node in chosen.items():
            if name in self.pattern.by_name[reader].named:
                return dict.fromkeys(self._inputs_called(name, self.pattern.by_name[reader], node))
        wanted = self.pattern.by_name[name]
        read = [node for n, node in chosen.items() if n in wanted.named]
        if read:
            return min((self._readers(wanted, node) for node in read), key=len)
        return self.index.candidates(wanted)

    def _inputs_called(self, name: str, reader: MatcherNode, node: fx.Node) -> list[fx.Node]:
        """Candidates for the input ``name`` of a node: what it reads in that position, and what that passes on."""
        return [found for way in self._ways(name, reader, node) for found in way]

    def _ways(self, name: str, reader: MatcherNode, node: fx.Node) -> list[list[fx.Node]]:
        known = self.ways.get((name, reader.name, node))
        if known is None:
            actual: Sequence[fx.Node] = self.index.inputs(node)
            if reader.input_match_type.ordered:
                actual = [actual[(reader.inputs or ()).index(name)]]
            known = [list(back_through(start, lambda n: self._passes(reader, n))) for start in actual]
            self.ways[name, reader.name, node] = known
        return known

    def _readers(self, wanted: MatcherNode, node: fx.Node) -> list[fx.Node]:
        """The nodes that read a node, directly or through what ``wanted`` lets through."""
        found = dict.fromkeys(node.users)
        for user in [u for u in node.users if first_input(u) is node and self._passes(wanted, u)]:
            found.update(dict.fromkeys(self._readers(wanted, user)))
        return list(found)

    def _passes(self, reader: MatcherNode, node: fx.Node) -> bool:
        if reader.through == ():
            return False
        known = self.index.kind(node), self.index.instance(node)
        return _asked("through", {reader.name: node}, lambda _: reader.lets_through(node, *known))

    def _fits(self, name: str, node: fx.Node, chosen: dict[str, fx.Node]) -> bool:
        """Whether a node has the wanted kind, is free, and relates to the chosen nodes as the pattern says."""
        wanted = self.pattern.by_name[name]
        if not wanted.may_be(self.index.kind(node)) or node in chosen.values() or not self._arity_fits(wanted, node):
            return False
        for other, taken in chosen.items():
            reader = self.pattern.by_name[other]
            if other in wanted.named and not self._edge_fits(wanted, node, other, taken):
                return False
            if name in reader.named and not self._edge_fits(reader, taken, name, node):
                return False
        return True

    def _arity_fits(self, wanted: MatcherNode, node: fx.Node) -> bool:
        if wanted.inputs is None:
            return True
        actual = len(self.index.inputs(node))
        return actual == len(wanted.inputs) if wanted.input_match_type.exact else actual >= len(wanted.inputs)

    def _edge_fits(self, reader: MatcherNode, node: fx.Node, name: str, given: fx.Node) -> bool:
        """Whether ``given`` (``name`` in the pattern) is among a node's inputs as often and where it should be."""
        if reader.through != ():
            return given in self._inputs_called(name, reader, node)
        inputs, actual = reader.inputs or (), self.index.inputs(node)
        if reader.input_match_type.ordered:
            return all(a is given for i, a in zip(inputs, actual, strict=False) if i == name)
        return actual.count(given) >= inputs.count(name)

    def _ask(self, name: str, node: fx.Node) -> Any:
        checker: Callable[..., Any] | None = self.pattern.by_name[name].checker
        if checker is None:
            return True
        if (name, node) not in self.verdicts:

            def ask(views: bool) -> Any:
                instance = self.index.instance(node)
                return checker(node, _view(node, instance) if views else instance)

            self.verdicts[name, node] = _verdict(_asked("checker", {name: node}, ask))
        return self.verdicts[name, node]

    def _ask_joint(self, checker: JointChecker, chosen: dict[str, fx.Node], modules: dict[str, Any]) -> Any:
        def ask(views: bool) -> Any:
            known = {name: _view(chosen[name], module) for name, module in modules.items()} if views else modules
            return checker.check(chosen, known)

        return _asked("joint checker", {name: chosen[name] for name in checker.names}, ask)

    def _complete(self, chosen: dict[str, fx.Node], reasons: tuple[str, ...]) -> Match:
        nodes = {name: chosen[name] for name in self.pattern.by_name}
        chains = self._chains(nodes)
        between = tuple(node for chain in chains.values() for node in chain)
        inside = {*nodes.values(), *between}
        for name in self.pattern.closed:
            told = (_readers_outside(node, inside) for node in (nodes[name], *chains.get(name, ())))
            reasons += tuple(filter(None, told))
        modules = {name: self.index.instance(node) for name, node in nodes.items()}
        return Match(nodes, modules, reasons, between)

    def _chains(self, nodes: dict[str, fx.Node]) -> dict[str, list[fx.Node]]:
        """The nodes between a node and those that read it through others, by the name of the node read."""
        chains: dict[str, list[fx.Node]] = {}
        for reader in self.pattern.readers_through:
            (name,) = reader.named
            way = next(w for w in self._ways(name, reader, nodes[reader.name]) if nodes[name] in w)
            chains.setdefault(name, []).extend(way[: way.index(nodes[name])])
        return chains


def _readers_outside(node: fx.Node, inside: set[fx.Node]) -> str | None:
    strangers = [node_name(user) for user in node.users if user not in inside and not is_guard(user)]
    return f"{node_name(node)} is also read by {', '.join(strangers)}" if strangers else None


def _view(node: fx.Node, instance: object) -> Any:
    return CallView(node, instance) if node.op in ("call_function", "call_method") else instance


def _asked(what: str, nodes: dict[str, fx.Node], ask: Callable[[bool], Any]) -> Any:
    """Call a function of the pattern's author on the nodes of these names; if it fails, name it and the place.

    A function has no settings like a module; if the checker asks for one, it gets views of the calls instead.
    """
    try:
        try:
            return ask(False)
        except AttributeError:
            return ask(True)
    except Exception as error:
        asked, where = ", ".join(map(repr, nodes)), ", ".join(map(node_name, nodes.values()))
        raise ScheduleError(f"the {what} of {asked}, at {where}, failed: {type(error).__name__}: {error}") from error


def is_in_graph(node: fx.Node) -> bool:
    """Whether a node has not been erased: its neighbours in the graph's list still link to it."""
    return node.prev.next is node


def _verdict(answer: object) -> Any:
    """A checker's answer as True, False, or a string that says why not."""
    return answer if isinstance(answer, str) and answer else bool(answer)
