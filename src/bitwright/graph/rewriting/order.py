"""The order of schedules: by what they declare to come before and after, and by name otherwise."""

import heapq
from collections.abc import Mapping

from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.graph.rewriting.schedule import SCHEDULES, Schedule, Stage


def order_schedules(stage: Stage) -> list[Schedule]:
    """The schedules of a stage, each after those it names; by name where nothing else is declared."""
    mine = {schedule.name: schedule for schedule in SCHEDULES.values() if schedule.stage == stage}
    earlier = {name: _before(schedule, mine) for name, schedule in mine.items()}
    for schedule in mine.values():
        for later in _after(schedule, mine):
            earlier[later].add(schedule.name)
    _add_globs(mine, earlier)
    order = _sort(earlier)
    if len(order) < len(mine):
        circle = _circle({n: e - set(order) for n, e in earlier.items() if n not in order})
        raise ConfigError(f"schedules of stage {stage!r} wait for each other: {' after '.join(map(repr, circle))}")
    return [mine[name] for name in order]


def _before(schedule: Schedule, mine: Mapping[str, Schedule]) -> set[str]:
    names = _named(schedule, schedule.after, "after")
    if schedule.stage == "simplify" and (late := sorted(names - mine.keys())):
        raise ConfigError(f"the schedule {schedule.name!r} of stage 'simplify' cannot run after {late[0]!r} of 'fuse'")
    return names & mine.keys()


def _after(schedule: Schedule, mine: Mapping[str, Schedule]) -> set[str]:
    names = _named(schedule, schedule.before, "before")
    if schedule.stage == "fuse" and (early := sorted(names - mine.keys())):
        name = schedule.name
        raise ConfigError(f"the schedule {name!r} of stage 'fuse' cannot run before {early[0]!r} of 'simplify'")
    return names & mine.keys()


def _named(schedule: Schedule, names: tuple[str, ...], word: str) -> set[str]:
    for name in names:
        if name != "*" and name not in SCHEDULES:
            meant = suggest(name, SCHEDULES.names())
            raise UnknownNameError(
                f"the schedule {schedule.name!r} is to run {word} the unknown schedule {name!r}{meant}"
            )
    return {SCHEDULES.get(name).name for name in names if name != "*"}


def _add_globs(mine: Mapping[str, Schedule], earlier: dict[str, set[str]]) -> None:
    """Let those that want to be first or last be so, as far as nobody else wants to be before or after them."""
    for name, schedule in mine.items():
        if "*" in schedule.before:
            ahead = _all_before(name, earlier)
            for other in mine.keys() - ahead - {name}:
                if "*" not in mine[other].before:
                    earlier[other].add(name)
        if "*" in schedule.after:
            behind = {other for other in mine if name in _all_before(other, earlier)}
            earlier[name] |= {o for o in mine.keys() - behind - {name} if "*" not in mine[o].after}


def _all_before(name: str, earlier: Mapping[str, set[str]]) -> set[str]:
    found, waiting = set(), [name]
    while waiting:
        for other in earlier[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found


def _sort(earlier: Mapping[str, set[str]]) -> list[str]:
    left = {name: set(names) for name, names in earlier.items()}
    ready = sorted(name for name, names in left.items() if not names)
    order: list[str] = []
    while ready:
        done = heapq.heappop(ready)
        order.append(done)
        for name, names in left.items():
            if done in names:
                names.remove(done)
                if not names:
                    heapq.heappush(ready, name)
    return order


def _circle(earlier: Mapping[str, set[str]]) -> list[str]:
    path = [min(earlier)]
    while path[-1] not in path[:-1]:
        path.append(min(earlier[path[-1]] & earlier.keys()))
    return path[path.index(path[-1]) :]
