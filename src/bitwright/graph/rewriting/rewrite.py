"""The engine of pattern schedules: search, rewrite every match, and search again until nothing matches."""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from bitwright.errors import ConfigError, ScheduleError, suggest
from bitwright.graph.build import describe_new, put_in_place, replace
from bitwright.graph.effects import remove_unused
from bitwright.graph.facts import facts, inherit_facts
from bitwright.graph.match.find import Match, Matcher, is_in_graph
from bitwright.graph.match.index import GraphIndex
from bitwright.graph.match.pattern import Pattern
from bitwright.graph.names import node_name
from bitwright.graph.rewriting.replace import Replacement, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.settle import Settling
from bitwright.graph.rewriting.sort import sort_nodes
from bitwright.graph.walks import needed_for


@dataclass
class PassResult:
    """What one schedule did to one model.

    Attributes:
        applied: number of matches passed to it for rewriting.
    """

    name: str
    modified: bool = False
    notes: list[str] = field(default_factory=list)
    applied: int = 0


def rewrite(
    schedule: ReplacePatternBase, model: fx.GraphModule, name: str, index: GraphIndex | None = None
) -> PassResult:
    """Rewrite a model's whole graph with one schedule; the caller recompiles the model."""
    return _Rewriter(schedule, model, name).run(index or GraphIndex(model))


class _Rewriter:
    def __init__(self, schedule: ReplacePatternBase, model: fx.GraphModule, name: str) -> None:
        self.schedule = schedule
        self.model = model
        self.name = name
        self.result = PassResult(name)
        schedule._notes = self.result.notes
        self._guard("begin", lambda: schedule.begin(model))
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
            found: list[Match] = self._guard("matching", lambda index=index: list(self.matcher.find_near(index)))
            last = self._sweep([m for m in found if not m.reasons], index)
            if last is None or not self.strategy.repeats:
                break
            index.update()
            if not watch.may_go_on(index, self.result.applied):
                raise ScheduleError(
                    f"the schedule {self.name!r} never settles: it has rewritten a graph of {watch.size} nodes "
                    f"{self.result.applied} times and still matches, last at {self._place(last)}; "
                    "make its checkers refuse its own results"
                )
        self._tell_near_misses(found)
        before = len(self.result.notes)
        self._guard("finish", lambda: self.schedule.finish(self.model))
        self.result.modified |= self._did_something_since(before)
        return self.result

    def _sweep(self, matches: list[Match], index: GraphIndex) -> Match | None:
        """Rewrite the matches of one search, as far as the strategy allows; return the last one rewritten."""
        touched: set[fx.Node] = set()
        last: Match | None = None
        for match in matches:
            shares = not touched.isdisjoint(match.key)
            if match.key in self.done or (shares and not self.strategy.intersects):
                continue
            doubtful = last and (shares or not match.is_untouched(self.model))
            if doubtful and not self._guard("matching", lambda match=match: self.matcher.holds(match, index)):
                continue
            touched.update(match.key)
            self._apply(match, index)
            last = match
            if self.strategy is ReplaceStrategy.APPLY_ONE:
                break
        return last

    def _tell_near_misses(self, found: list[Match]) -> None:
        """Note one near miss for each set of anchors that still exist and have no match."""
        matched = {self._anchors(m) for m in found if not m.reasons}
        near: dict[tuple[fx.Node, ...], Match] = {}
        for miss in (m for m in found if m.reasons and self._anchors(m) not in matched):
            near.setdefault(self._anchors(miss), miss)
        for anchors, miss in near.items():
            if all(map(is_in_graph, anchors)):
                self.schedule.near_miss(anchors[-1], "; ".join(miss.reasons))

    def _apply(self, match: Match, index: GraphIndex) -> None:
        self.done.add(match.key)
        before = len(self.result.notes)
        with self.model.graph.inserting_before(max(match.key).next):
            answer = self._guard(
                "get_new_graph",
                lambda: self.schedule.get_new_graph(
                    dict(match.nodes), dict(match.modules), self.model, self.result.applied
                ),
                match,
            )
        self.result.applied += 1
        replaced = {o: n for o, n in self._replacements(answer, match).items() if o is not n}
        if replaced:
            if len(self.result.notes) == before:
                self.schedule.note(f"{self.schedule.done} {', '.join(map(node_name, replaced))}")
            self._put(replaced, match, index)
        self.result.modified |= bool(replaced) or self._did_something_since(before)

    def _did_something_since(self, before: int) -> bool:
        return any(not line.startswith("not ") for line in self.result.notes[before:])

    def _replacements(self, answer: object, match: Match) -> dict[fx.Node, Replacement]:
        """What get_new_graph returned, checked, by the node that it replaces."""
        if answer is None:
            return {}
        where = f"the schedule {self.name!r}, at {self._place(match)},"
        if isinstance(answer, fx.Node | tuple | list):
            if len(self.pattern.anchors) > 1:
                names = ", ".join(self.pattern.anchors)
                raise ScheduleError(f"{where} has several anchors ({names}): return the new nodes as a dict by name")
            answer = {self.pattern.anchors[0]: answer}
        if not isinstance(answer, Mapping):
            raise ScheduleError(f"{where} must return a node, a dict of nodes by name, or None, not {answer!r}")
        for name, made in answer.items():
            if name not in match.nodes:
                known = suggest(name, match.nodes)
                raise ScheduleError(f"{where} replaces {name!r}, which is not a node of its pattern{known}")
            self._check_made(made, f"{where} replaces {name!r}")
        return {match.nodes[name]: made for name, made in answer.items()}

    def _check_made(self, made: object, where: str) -> None:
        given = [part for part in made if part is not None] if isinstance(made, tuple | list) else [made]
        for node in given:
            if not isinstance(node, fx.Node) or not is_in_graph(node) or node.graph is not self.model.graph:
                raise ScheduleError(f"{where} with {node!r}, which is not a node of the model's graph")

    def _put(self, replaced: dict[fx.Node, Replacement], match: Match, index: GraphIndex) -> None:
        """Make all readers but the new nodes themselves read the new nodes, then remove what nothing reads."""
        ends = [n for made in replaced.values() for n in _parts(made) if n is not None]
        new = dict.fromkeys(needed_for(ends, lambda node: not index.knows(node)))
        _bring_into_order(new)
        taken = tuple(dict.fromkeys(map(node_name, match.key))) if new else ()
        scope = facts(next(iter(replaced))).scope
        for old, made in replaced.items():
            _hand_over(old, made, new)
        if new:
            describe_new(self.model, new, scope, taken)
            index.refresh(new)
        remove_unused(self.model, reversed(match.key), replaced=match.key)
        if any(not node < user for node in ends for user in node.users):
            self._guard("its result", lambda: sort_nodes(self.model.graph), match)

    def _anchors(self, match: Match) -> tuple[fx.Node, ...]:
        return tuple(match.nodes[name] for name in self.pattern.anchors)

    def _place(self, match: Match) -> str:
        return ", ".join(node_name(node) for node in self._anchors(match))

    def _guard(self, where: str, action: Callable[[], Any], match: Match | None = None) -> Any:
        """Run a schedule author's code, and name the schedule if it fails."""
        try:
            return action()
        except (ConfigError, ScheduleError) as error:
            raise type(error)(f"the schedule {self.name!r}: {error}") from error
        except Exception as error:
            where = where if match is None else f"{where} at {self._place(match)}"
            raise ScheduleError(
                f"the schedule {self.name!r} failed in {where}: {type(error).__name__}: {error}"
            ) from error


def _parts(made: Replacement) -> Sequence[fx.Node | None]:
    return (made,) if isinstance(made, fx.Node) else made


def _hand_over(old: fx.Node, made: Replacement, new: Collection[fx.Node]) -> None:
    """Make all readers of a node read what replaces it, except those created with that."""
    if not isinstance(made, fx.Node):
        _hand_over_parts(old, made, new)
        return
    if made in new:
        inherit_facts(old, made)
    old.replace_all_uses_with(made, delete_user_cb=lambda user: user not in new and user is not made)


def _hand_over_parts(old: fx.Node, parts: Sequence[fx.Node | None], new: Collection[fx.Node]) -> None:
    """Make readers of one value of a call read its part, and readers of the whole a tuple of all parts."""
    for user in [u for u in old.users if u not in new]:
        index = user.args[1] if user.target is operator.getitem and user.args[0] is old else None
        if isinstance(index, int) and -len(parts) <= index < len(parts):
            part = parts[index]
            if part is not None and part in new:
                inherit_facts(user, part)
            replace(user, part)
        else:
            put_in_place(user, old, tuple(parts))


def _bring_into_order(nodes: Iterable[fx.Node]) -> None:
    """Move each of ``nodes`` behind what it reads, because ``inserting_after`` puts several in reverse order."""
    for node in nodes:
        late = [n for n in node.all_input_nodes if not n < node]
        if late:
            max(late).append(node)
