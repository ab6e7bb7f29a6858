"""The engine of pattern schedules: search, rewrite every match, and search again until nothing is left to do."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from bitwright.errors import ConfigError, ScheduleError, suggest
from bitwright.graph.build import describe_new
from bitwright.graph.effects import remove_unused
from bitwright.graph.facts import facts, inherit_facts
from bitwright.graph.match.find import Match, Matcher, is_in_graph
from bitwright.graph.match.index import GraphIndex
from bitwright.graph.match.pattern import Pattern
from bitwright.graph.names import node_name
from bitwright.graph.rewriting.replace import ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.settle import Settling
from bitwright.graph.rewriting.sort import sort_nodes


@dataclass
class PassResult:
    """What one schedule did to one model.

    Attributes:
        name: the schedule's.
        modified: whether it changed anything.
        applied: how many matches it was given to rewrite.
        notes: a line for each thing that it did, or declined to do.
    """

    name: str
    modified: bool = False
    notes: list[str] = field(default_factory=list)
    applied: int = 0


def rewrite(
    schedule: ReplacePatternBase, model: fx.GraphModule, name: str, index: GraphIndex | None = None
) -> PassResult:
    """Rewrite all of a model's graph by one schedule; the code of the model is left to the caller to make anew."""
    return _Rewriter(schedule, model, name).run(index or GraphIndex(model))


class _Rewriter:
    def __init__(self, schedule: ReplacePatternBase, model: fx.GraphModule, name: str) -> None:
        self.schedule = schedule
        self.model = model
        self.name = name
        self.result = PassResult(name)
        schedule._notes = self.result.notes
        self.strategy: ReplaceStrategy = self._guard("make_matching_strategy", schedule.make_matching_strategy)
        if not isinstance(self.strategy, ReplaceStrategy):
            raise ConfigError(
                f"the schedule {name!r} must return one of ReplaceStrategy from make_matching_strategy, "
                f"not {self.strategy!r}"
            )
        nodes = self._guard("make_ops", schedule.make_nodes)
        joint = self._guard("make_joint_checkers", schedule.make_joint_checkers)
        self.pattern = self._guard("its pattern", lambda: Pattern(nodes, joint))
        self.matcher = Matcher(self.pattern)
        self.done: set[tuple[fx.Node, ...]] = set()

    def run(self, index: GraphIndex) -> PassResult:
        watch = Settling(index)
        while True:
            near: dict[tuple[fx.Node, ...], Match] = {}
            last = self._sweep(index, near)
            if last is None or not self.strategy.repeats:
                break
            index = GraphIndex(self.model)
            if not watch.may_go_on(index, self.result.applied):
                raise ScheduleError(
                    f"the schedule {self.name!r} never settles: it has rewritten a graph of {watch.size} nodes "
                    f"{self.result.applied} times and still matches, last at {self._place(last)}; "
                    "let its checkers refuse what it has made"
                )
        for anchors, match in near.items():
            if not all(map(is_in_graph, anchors)):
                continue
            self.schedule.near_miss(match.nodes[self.pattern.anchors[-1]], "; ".join(match.reasons))
        return self.result

    def _sweep(self, index: GraphIndex, near: dict[tuple[fx.Node, ...], Match]) -> Match | None:
        """Search once and rewrite; fill ``near`` with the near misses, one for each set of anchors."""
        found = self._guard("matching", lambda: list(self.matcher.find_near(index)))
        matches = [m for m in found if not m.reasons]
        matched = {self._anchors(m) for m in matches}
        for miss in (m for m in found if m.reasons and self._anchors(m) not in matched):
            near.setdefault(self._anchors(miss), miss)
        touched: set[fx.Node] = set()
        last: Match | None = None
        for match in matches:
            if match.key in self.done or (not self.strategy.intersects and touched & set(match.key)):
                continue
            if last and not self._guard("matching", lambda match=match: self.matcher.holds(match, index)):
                continue
            touched.update(match.key)
            self._apply(match, index)
            last = match
            if self.strategy is ReplaceStrategy.APPLY_ONE:
                break
        return last

    def _apply(self, match: Match, index: GraphIndex) -> None:
        self.done.add(match.key)
        before = len(self.result.notes)
        with self.model.graph.inserting_before(max(match.key).next):
            answer = self._guard(
                f"get_new_graph at {self._place(match)}",
                lambda: self.schedule.get_new_graph(
                    dict(match.nodes), dict(match.modules), self.model, self.result.applied
                ),
            )
        self.result.applied += 1
        replaced = {o: n for o, n in self._replacements(answer, match).items() if o is not n}
        if replaced:
            self._put(replaced, match, index)
            names = ", ".join(node_name(old) for old in replaced)
            if len(self.result.notes) == before:
                self.schedule.note(f"{self.schedule.done} {names}")
        noted = any(not line.startswith("not ") for line in self.result.notes[before:])
        self.result.modified |= bool(replaced) or noted

    def _replacements(self, answer: Any, match: Match) -> dict[fx.Node, fx.Node]:
        where = f"the schedule {self.name!r}, at {self._place(match)},"
        if answer is None:
            return {}
        if isinstance(answer, fx.Node):
            if len(self.pattern.anchors) > 1:
                names = ", ".join(self.pattern.anchors)
                raise ScheduleError(f"{where} has several anchors ({names}): return the new nodes as a dict by name")
            answer = {self.pattern.anchors[0]: answer}
        if not isinstance(answer, Mapping):
            raise ScheduleError(f"{where} must return a node, a dict of nodes by name, or None, not {answer!r}")
        for name, node in answer.items():
            if name not in match.nodes:
                raise ScheduleError(f"{where} replaces {name!r}, no node of its pattern{suggest(name, match.nodes)}")
            if not isinstance(node, fx.Node) or not is_in_graph(node) or node.graph is not self.model.graph:
                raise ScheduleError(f"{where} replaces {name!r} by {node!r}, which is no node of the model's graph")
        return {match.nodes[name]: node for name, node in answer.items()}

    def _put(self, replaced: dict[fx.Node, fx.Node], match: Match, index: GraphIndex) -> None:
        """Let everybody read the new nodes, but the new nodes themselves; then take away what nobody reads."""
        new = _new_nodes(replaced.values(), index)
        _bring_into_order(new)
        for old, node in replaced.items():
            if node in new:
                inherit_facts(old, node)
            old.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: user not in new and user is not node)
        scope = facts(next(iter(replaced))).scope
        taken = tuple(dict.fromkeys(node_name(node) for node in match.key))
        describe_new(self.model, new, scope, taken)
        index.refresh(new)
        remove_unused(self.model, reversed(match.key), replaced=match.key)
        if any(not node < user for node in replaced.values() for user in node.users):
            self._guard(f"its result at {self._place(match)}", lambda: sort_nodes(self.model.graph))

    def _anchors(self, match: Match) -> tuple[fx.Node, ...]:
        return tuple(match.nodes[name] for name in self.pattern.anchors)

    def _place(self, match: Match) -> str:
        return ", ".join(node_name(node) for node in self._anchors(match))

    def _guard(self, where: str, action: Callable[[], Any]) -> Any:
        """Do what a schedule's author wrote, and name the schedule if it fails."""
        try:
            return action()
        except (ConfigError, ScheduleError) as error:
            raise type(error)(f"the schedule {self.name!r}: {error}") from error
        except Exception as error:
            raise ScheduleError(
                f"the schedule {self.name!r} failed in {where}: {type(error).__name__}: {error}"
            ) from error


def _new_nodes(ends: Iterable[fx.Node], index: GraphIndex) -> dict[fx.Node, None]:
    """The nodes that came into being since the index was made, from which ``ends`` are computed, in order."""
    found: dict[fx.Node, None] = {}
    waiting = [(node, False) for node in ends]
    while waiting:
        node, inputs_done = waiting.pop()
        if inputs_done:
            found[node] = None
        elif not index.knows(node) and node not in found:
            waiting.append((node, True))
            waiting += [(n, False) for n in node.all_input_nodes]
    return found


def _bring_into_order(nodes: Iterable[fx.Node]) -> None:
    """Move each of ``nodes`` behind what it reads: ``inserting_after`` puts several in the reverse order."""
    for node in nodes:
        late = [n for n in node.all_input_nodes if not n < node]
        if late:
            max(late).append(node)
